// Claude Code sends a picture that its user pastes, and one that its tool Read reads.
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";

import { SEEN, TOLD, check, pictures, png, recorder, report, shapes } from "./common.mjs";

const folder = mkdtempSync(join(tmpdir(), "claude-"));
const recorded = await recorder();
const quiet = { CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", DISABLE_TELEMETRY: "1", DISABLE_AUTOUPDATER: "1" };
const kinds = ["", "DEFAULT_HAIKU_", "DEFAULT_SONNET_", "DEFAULT_OPUS_"];
const models = Object.fromEntries(kinds.map((kind) => [`ANTHROPIC_${kind}MODEL`, "scripted"]));
const server = { ANTHROPIC_BASE_URL: recorded.url, ANTHROPIC_AUTH_TOKEN: "none", CLAUDE_CODE_AUTO_COMPACT_WINDOW: "100000" };
writeFileSync(join(folder, "picture.png"), png());

// Ask one question. Returns the pictures of the last request.
async function ask(content) {
  recorded.seen.length = 0;
  const before = await pictures();
  const env = { ...process.env, ...quiet, ...models, ...server, HOME: folder, PWD: folder };
  const form = ["--input-format", "stream-json", "--output-format", "stream-json", "--verbose"];
  const words = ["-p", "--allowedTools", "Read", ...form];
  const program = spawn(resolve("node_modules/.bin/claude"), words, { cwd: folder, env, stdio: ["pipe", "pipe", "inherit"] });
  const limit = setTimeout(() => program.kill(), 200000);
  let told = {};
  createInterface({ input: program.stdout }).on("line", (line) => {
    const found = JSON.parse(line);
    if (found.type === "result") {
      told = found;
      program.stdin.end();
    }
  });
  program.stdin.write(`${JSON.stringify({ type: "user", message: { role: "user", content } })}\n`);
  await new Promise((done) => program.on("close", done));
  clearTimeout(limit);
  const asked = recorded.seen.filter(({ path }) => path !== "/");
  const found = shapes(asked.at(-1).body.messages);
  console.error(JSON.stringify(found));
  check(told.result === TOLD && !told.is_error, told);
  check(asked.every(({ status }) => status === 200), asked.map(({ status, answer }) => [status, answer]));
  check((await pictures()) > before, { before });
  return found;
}

await report("@anthropic-ai/claude-code", {
  pasted: async () => {
    const source = { type: "base64", media_type: "image/png", data: png().toString("base64") };
    const found = await ask([{ type: "image", source }, { type: "text", text: SEEN }]);
    check(found.length === 1, found);
  },
  "read by a tool": async () => {
    const found = await ask("Look at picture.png");
    check(found.length === 1, found);
  },
});
recorded.close();
rmSync(folder, { recursive: true, force: true });
