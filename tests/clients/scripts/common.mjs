// What the scripts of node's clients share; as common.py.
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { crc32, deflateSync } from "node:zlib";
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

// what the model of scripted_model.py says of a picture, and the PNG of common.py's picture(1)
export const TOLD = "The file made.txt is there.";
export const SEEN = "What is in this picture?";

export function png() {
  const chunk = (kind, body) => {
    const head = Buffer.concat([Buffer.from(kind), body]);
    const [size, sum] = [Buffer.alloc(4), Buffer.alloc(4)];
    size.writeUInt32BE(body.length);
    sum.writeUInt32BE(crc32(head));
    return Buffer.concat([size, head, sum]);
  };
  const size = Buffer.from([0, 0, 0, 64, 0, 0, 0, 64, 8, 2, 0, 0, 0]);
  const row = Buffer.concat([Buffer.from([0]), ...Array(64).fill(Buffer.from([1, 0, 254]))]);
  const rows = deflateSync(Buffer.concat(Array(64).fill(row)));
  const mark = Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
  return Buffer.concat([mark, chunk("IHDR", size), chunk("IDAT", rows), chunk("IEND", Buffer.alloc(0))]);
}

// Pictures that the server has read so far.
export async function pictures() {
  const text = await (await fetch(`${URL}/metrics`)).text();
  return [...text.matchAll(/^jaxserve:images_total.* (\S+)$/gm)].reduce((sum, found) => sum + Number(found[1]), 0);
}

// Where pictures stand in a body, as `{form, where}`, without their data: the shape that a client sends.
export function shapes(value, where = "") {
  if (value === null || typeof value !== "object") return [];
  if (["image", "image_url", "input_image"].includes(value.type)) {
    const form = JSON.stringify(value, (_, each) => (typeof each === "string" && each.length > 64 ? `${each.slice(0, 22)}...` : each));
    return [{ where, form }];
  }
  return Object.entries(value).flatMap(([name, each]) => shapes(each, `${where}.${name}`));
}

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
