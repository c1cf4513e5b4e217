// opencode runs a command and tells of it, with the model of tests/clients/scripted_model.py.
import { spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

import { URL, check, report } from "./common.mjs";

const folder = mkdtempSync(join(tmpdir(), "opencode-"));
const config = {
  provider: {
    jaxserve: {
      npm: "@ai-sdk/openai-compatible",
      options: { baseURL: `${URL}/v1`, apiKey: "none" },
      models: { scripted: { limit: { context: 32768, output: 512 } } },
    },
  },
  model: "jaxserve/scripted",
  small_model: "jaxserve/scripted",
  permission: "allow",
  autoupdate: false,
  share: "disabled",
};

await report("opencode-ai", {
  "tool loop": async () => {
    writeFileSync(join(folder, "opencode.json"), JSON.stringify(config));
    const home = { HOME: folder, PWD: folder, XDG_CONFIG_HOME: folder, XDG_DATA_HOME: folder, XDG_CACHE_HOME: folder, XDG_STATE_HOME: folder };
    const env = { ...process.env, ...home, OPENCODE_CONFIG: join(folder, "opencode.json"), OPENCODE_DISABLE_MODELS_FETCH: "1" };
    const command = resolve("node_modules/.bin/opencode");
    const done = spawnSync(command, ["run", "--model", "jaxserve/scripted", "Make made.txt"], { cwd: folder, env, encoding: "utf8", timeout: 200000 });
    check(existsSync(join(folder, "made.txt")), done.stdout + done.stderr);
    check(done.stdout.includes("made.txt is there."), done.stdout + done.stderr);
  },
});
rmSync(folder, { recursive: true, force: true });
