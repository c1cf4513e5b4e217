// Codex sends a picture that its user names, and one that its tool view_image reads.
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { text } from "node:stream/consumers";

import { SEEN, TOLD, check, pictures, png, recorder, report, shapes } from "./common.mjs";

const folder = mkdtempSync(join(tmpdir(), "codex-"));
const recorded = await recorder();
const provider = `{name="jaxserve",base_url="${recorded.url}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}`;
writeFileSync(join(folder, "picture.png"), png());

// Ask one question. Returns the pictures of the last request.
async function ask(...words) {
  recorded.seen.length = 0;
  const before = await pictures();
  const env = { ...process.env, OPENAI_API_KEY: "none", HOME: folder, PWD: folder };
  const server = ["-m", "scripted", "-c", "model_provider=jaxserve", "-c", `model_providers.jaxserve=${provider}`];
  const open = ["--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--json"];
  const program = spawn(resolve("node_modules/.bin/codex"), ["exec", ...server, ...open, ...words], { cwd: folder, env });
  const limit = setTimeout(() => program.kill(), 200000);
  program.stdin.end();
  const [out, errors] = await Promise.all([text(program.stdout), text(program.stderr)]);
  clearTimeout(limit);
  const events = out.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
  const texts = events.filter((event) => event.item?.type === "agent_message").map((event) => event.item.text);
  const asked = recorded.seen.filter(({ path }) => path.endsWith("/responses"));
  const found = shapes(asked.at(-1)?.body.input);
  console.error(JSON.stringify(found));
  check(texts.at(-1) === TOLD, { texts, errors: errors.slice(-500), out: out.slice(-500) });
  check(asked.every(({ status }) => status === 200), asked.map(({ status, answer }) => [status, answer.slice(0, 500)]));
  check((await pictures()) > before, { before });
  return found;
}

await report("@openai/codex", {
  pasted: async () => {
    const found = await ask("-i", "picture.png", "--", SEEN);
    check(found.length === 1, found);
  },
  view_image: async () => {
    const found = await ask("Look at picture.png");
    check(found.length === 1, found);
  },
});
recorded.close();
rmSync(folder, { recursive: true, force: true });
