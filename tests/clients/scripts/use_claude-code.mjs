// Claude Code runs a command and tells of it, with the model of tests/clients/scripted_model.py.
import { spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

import { URL, check, report } from "./common.mjs";

const folder = mkdtempSync(join(tmpdir(), "claude-"));

await report("@anthropic-ai/claude-code", {
  "tool loop": async () => {
    const quiet = { CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", DISABLE_TELEMETRY: "1", DISABLE_AUTOUPDATER: "1" };
    const model = { ANTHROPIC_MODEL: "scripted", ANTHROPIC_SMALL_FAST_MODEL: "scripted" };
    const server = { ANTHROPIC_BASE_URL: URL, ANTHROPIC_AUTH_TOKEN: "none" };
    const env = { ...process.env, ...quiet, ...model, ...server, HOME: folder, PWD: folder };
    const command = resolve("node_modules/.bin/claude");
    const words = ["-p", "Make made.txt", "--allowedTools", "Bash", "--output-format", "json"];
    const done = spawnSync(command, words, { cwd: folder, env, input: "", encoding: "utf8", timeout: 200000 });
    check(existsSync(join(folder, "made.txt")), done.stdout + done.stderr);
    const told = JSON.parse(done.stdout);
    check(told.result === "The file made.txt is there." && !told.is_error && told.num_turns === 2, told);
    // the second turn finds the first one's prompt in the prefix cache
    const { cache_read_input_tokens: read, cache_creation_input_tokens: written, input_tokens: rest } = told.usage;
    check(read >= 0.99 * (written + rest - 100), told.usage);
  },
});
rmSync(folder, { recursive: true, force: true });
