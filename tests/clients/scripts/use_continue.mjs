// Continue's shell runs a command and tells of it, with the model of tests/clients/scripted_model.py.
import { spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

import { URL, check, refusals, report } from "./common.mjs";

const folder = mkdtempSync(join(tmpdir(), "continue-"));
const model = {
  name: "scripted",
  provider: "openai",
  model: "scripted",
  apiBase: `${URL}/v1`,
  apiKey: "none",
  roles: ["chat"],
  capabilities: ["tool_use"],
  defaultCompletionOptions: { contextLength: 32768, maxTokens: 512 },
};

await report("@continuedev/cli", {
  "tool loop": async () => {
    const before = await refusals();
    const config = join(folder, "config.yaml"); // JSON is YAML
    writeFileSync(config, JSON.stringify({ name: "jaxserve", version: "1.0.0", schema: "v1", models: [model] }));
    const env = { ...process.env, HOME: folder, PWD: folder, CONTINUE_GLOBAL_DIR: folder, CONTINUE_TELEMETRY_ENABLED: "0" };
    const command = resolve("node_modules/.bin/cn");
    const words = ["-p", "Make made.txt", "--config", config, "--auto"];
    const done = spawnSync(command, words, { cwd: folder, env, input: "", encoding: "utf8", timeout: 200000 });
    check(existsSync(join(folder, "made.txt")), done.stdout + done.stderr);
    check(done.stdout.trim() === "The file made.txt is there.", done.stdout + done.stderr);
    check((await refusals()) === before, await refusals());
  },
});
rmSync(folder, { recursive: true, force: true });
