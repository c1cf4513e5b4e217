// Codex runs a command and tells of it, with the model of tests/clients/scripted_model.py.
import { spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

import { URL, check, refusals, report } from "./common.mjs";

const folder = mkdtempSync(join(tmpdir(), "codex-"));
const provider = `{name="jaxserve",base_url="${URL}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}`;

await report("@openai/codex", {
  "tool loop": async () => {
    const before = await refusals();
    const env = { ...process.env, OPENAI_API_KEY: "none", HOME: folder, PWD: folder };
    const server = ["-m", "scripted", "-c", "model_provider=jaxserve", "-c", `model_providers.jaxserve=${provider}`];
    const open = ["--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--json"];
    const words = ["exec", ...server, ...open, "Make made.txt"];
    const command = resolve("node_modules/.bin/codex");
    const done = spawnSync(command, words, { cwd: folder, env, input: "", encoding: "utf8", timeout: 200000 });
    check(existsSync(join(folder, "made.txt")), done.stdout + done.stderr);
    const events = done.stdout.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
    const texts = events.filter((event) => event.item?.type === "agent_message").map((event) => event.item.text);
    check(texts.length === 1 && texts[0] === "The file made.txt is there.", texts);
    check(!events.some((event) => event.type === "error" || event.type === "turn.failed"), events);
    check((await refusals()) === before, await refusals());
    // two requests: the second finds the first one's prompt in the prefix cache
    const { input_tokens: read, cached_input_tokens: cached } = events.find((event) => event.usage).usage;
    check(cached >= 0.99 * (read / 2 - 200), { read, cached });
  },
});
rmSync(folder, { recursive: true, force: true });
