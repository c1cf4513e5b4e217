// Claude Code runs commands and tells of it, with the model of tests/clients/scripted_model.py.
import { spawn } from "node:child_process";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";

import { check, recorder, report } from "./common.mjs";

const TOLD = "The file made.txt is there.";
const TURNS = 20;
const folder = mkdtempSync(join(tmpdir(), "claude-"));
const recorded = await recorder();
const { seen } = recorded;
// as the line that the server prints, and a reminder from the system after every result and every question
const quiet = { CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", DISABLE_TELEMETRY: "1", DISABLE_AUTOUPDATER: "1" };
const kinds = ["", "DEFAULT_HAIKU_", "DEFAULT_SONNET_", "DEFAULT_OPUS_"];
const models = Object.fromEntries(kinds.map((kind) => [`ANTHROPIC_${kind}MODEL`, "scripted"]));
const compact = { CLAUDE_CODE_AUTO_COMPACT_WINDOW: "100000", CLAUDE_AUTOCOMPACT_PCT_OVERRIDE: "52" };
const reminder = { CLAUDE_CODE_TOTAL_TOKENS_REMINDER: "countdown", CLAUDE_CODE_TOTAL_TOKENS_REMINDER_AFTER_USER_TURN: "1" };
const key = process.env.JAXSERVE_SERVER__API_KEY;
const server = { ANTHROPIC_BASE_URL: recorded.url, ANTHROPIC_AUTH_TOKEN: key ?? "none" };

// Ask each question once the one before is answered. Returns the program's last line about an answer.
async function ask(questions, extra = {}) {
  seen.length = 0;
  const env = { ...process.env, ...quiet, ...models, ...compact, ...reminder, ...server, ...extra, HOME: folder, PWD: folder };
  const form = ["--input-format", "stream-json", "--output-format", "stream-json", "--verbose"];
  const words = ["-p", "--allowedTools", "Agent", "Bash", "CronList", "ToolSearch", ...form];
  const program = spawn(resolve("node_modules/.bin/claude"), words, { cwd: folder, env, stdio: ["pipe", "pipe", "inherit"] });
  const limit = setTimeout(() => program.kill(), 200000);
  const left = [...questions];
  let told = {};
  const next = () => {
    const content = left.shift();
    if (content === undefined) program.stdin.end();
    else program.stdin.write(`${JSON.stringify({ type: "user", message: { role: "user", content } })}\n`);
  };
  createInterface({ input: program.stdout }).on("line", (line) => {
    const found = JSON.parse(line);
    if (found.type === "result") {
      told = found;
      next();
    }
  });
  next();
  await new Promise((done) => program.on("close", done));
  clearTimeout(limit);
  return told;
}

// The requests that ask the model. Some versions of the program look first whether the server is there.
const asked = () => seen.filter(({ path }) => path !== "/");

// Tokens of the prompt of a request, and those of them that were in the prefix cache.
function tokens({ answer }) {
  const events = [...answer.matchAll(/^data: (.*)$/gm)].map((found) => JSON.parse(found[1]));
  const usage = Object.assign({}, ...events.map((event) => event.message?.usage ?? event.usage));
  const { input_tokens: rest, cache_creation_input_tokens: written, cache_read_input_tokens: cached } = usage;
  return { prompt: rest + (written ?? 0) + cached, cached };
}

// Each request of a conversation finds at least 99 % of the prompt before it.
function checkFound(name, requests) {
  console.error(`${name}\n| turn | late system messages | prompt | cached | of the last prompt |\n|---|---|---|---|---|`);
  let last = null;
  for (const [number, request] of requests.entries()) {
    const { prompt, cached } = tokens(request);
    const found = last === null ? null : (100 * cached) / last;
    const late = request.body.messages.filter((message) => message.role === "system").length;
    console.error(`| ${number} | ${late} | ${prompt} | ${cached} | ${found === null ? "-" : `${found.toFixed(2)} %`} |`);
    check(found === null || found >= 99, { number, prompt, cached, last });
    last = prompt;
  }
}

function checkTold(told, requests) {
  check(told.result === TOLD && !told.is_error && existsSync(join(folder, "made.txt")), told);
  check(seen.every(({ status }) => status === 200), seen.map(({ status }) => status));
  check(asked().length === requests, seen.map(({ path }) => path));
}

async function checkWrongKey() {
  const began = performance.now();
  const told = await ask(["Make made.txt"], { ANTHROPIC_AUTH_TOKEN: "wrong" });
  check(told.is_error && asked().length === 1 && asked()[0].status === 401, { told, seen });
  console.error(`a wrong key: ${((performance.now() - began) / 1000).toFixed(1)} s, one request`);
  check(performance.now() - began < 20000, performance.now() - began);
}

await report("@anthropic-ai/claude-code", {
  "tool loop": async () => {
    checkTold(await ask(["Make made.txt"]), 2);
    checkFound("a call", asked());
  },
  "20 calls": async () => {
    checkTold(await ask(["Make made.txt in 20 calls"]), TURNS + 1);
    checkFound("20 calls", asked());
    check(seen.at(-1).body.messages.filter((message) => message.role === "system").length > TURNS, "no reminders");
  },
  "20 questions": async () => {
    checkTold(await ask(Array.from({ length: TURNS }, (_, number) => `Make made.txt, ${number}`)), TURNS + 1);
    checkFound("20 questions", asked());
    check(seen.at(-1).body.messages.filter((message) => message.role === "system").length >= TURNS, "no reminders");
  },
  subagent: async () => {
    checkTold(await ask(["Make made.txt with a helper"]), 5);
    check(asked().some(({ body }) => !body.tools.some((tool) => tool.name === "ListAgents")), "no subagent");
  },
  "tool search": async () => {
    checkTold(await ask(["Make made.txt with a search"]), 3);
    checkFound("a tool search", asked());
    check(seen.at(-1).body.tools.some((tool) => tool.name === "CronList" && tool.defer_loading), "not deferred");
  },
  ...(key && { "wrong key": checkWrongKey }),
});
recorded.close();
rmSync(folder, { recursive: true, force: true });
