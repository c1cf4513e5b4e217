// What the scripts of node's clients share; as common.py.
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { text } from "node:stream/consumers";

export const FRANCE = "What is the capital of France?";
export const PARIS = "The capital of France is Paris.";
export const WEATHER = "What is the weather in Paris?";
export const PERSON = "Give me a person as JSON.";
export const RESULT = { temperature: 21, sky: "sunny" };
export const CITY = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
export const SCHEMA = {
  type: "object",
  properties: { name: { type: "string", enum: ["Ann", "Bob"] }, age: { type: "integer", enum: [7, 8] } },
  required: ["name", "age"],
  additionalProperties: false,
};
export const URL = process.argv[2] ?? "http://127.0.0.1:8000";

export function check(condition, seen) {
  if (!condition) throw new Error(`unexpected: ${JSON.stringify(seen)}`);
}

// Answers with a status of 400 and above so far.
export async function refusals() {
  const text = await (await fetch(`${URL}/metrics`)).text();
  const counts = [...text.matchAll(/^jaxserve:http_responses_total\{.*status="[45]..".*\} (\d+)/gm)];
  return counts.reduce((sum, found) => sum + Number(found[1]), 0);
}

// A server before the server, that notes each request with its answer: {url, seen, close}.
export async function recorder() {
  const seen = [];
  const server = createServer(async (request, response) => {
    const sent = await text(request);
    const entry = { path: request.url, body: sent && JSON.parse(sent), status: 0, answer: "" };
    seen.push(entry);
    const { host, connection, "content-length": length, ...headers } = request.headers;
    try {
      const answer = await fetch(URL + request.url, { method: request.method, headers, body: sent || undefined });
      entry.status = answer.status;
      const kept = [...answer.headers].filter(([name]) => !["content-encoding", "content-length"].includes(name));
      response.writeHead(answer.status, Object.fromEntries(kept));
      for await (const chunk of answer.body ?? []) {
        entry.answer += Buffer.from(chunk).toString();
        response.write(chunk);
      }
      response.end();
    } catch (error) {
      response.destroy(error);
    }
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return { url: `http://127.0.0.1:${server.address().port}`, seen, close: () => server.close() };
}

export async function report(client, tried) {
  const results = {};
  for (const [name, run] of Object.entries(tried)) {
    try {
      await run();
      results[name] = "ok";
    } catch (error) {
      console.error(error);
      results[name] = `${error.name}: ${error.message}`.slice(0, 300);
    }
  }
  const { version } = JSON.parse(readFileSync(join("node_modules", client, "package.json")));
  console.log(JSON.stringify({ client, version, results }));
}
