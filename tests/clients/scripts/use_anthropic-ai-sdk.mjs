import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

import { CITY, FRANCE, PARIS, PERSON, RESULT, SCHEMA, URL, WEATHER, check, report } from "./common.mjs";

const seen = [];
const noting = async (url, request) => {
  const response = await fetch(url, request);
  seen.push([JSON.parse(request.body).thread?.type ?? null, response.status]);
  return response;
};
const client = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0, fetch: noting });
const asked = { model: "demo", max_tokens: 200, temperature: 0 };
const weather = { name: "get_weather", description: "The weather in a city" };
const ask = (content, fields) => client.beta.messages.create({ ...asked, messages: [{ role: "user", content }], ...fields });

// A whole loop of the SDK's tool runner, and the thread and status of each of its requests.
async function loop(fields) {
  seen.length = 0;
  const tools = [betaTool({ ...weather, inputSchema: CITY, run: () => JSON.stringify(RESULT) })];
  const runner = client.beta.messages.toolRunner({ ...asked, tools, messages: [{ role: "user", content: WEATHER }], ...fields });
  if (fields.stream) for await (const stream of runner) await stream.finalMessage();
  const { content } = await runner.runUntilDone();
  check(content.at(-1).text.includes("sunny"), content);
  return JSON.stringify(seen);
}

await report("@anthropic-ai/sdk", {
  text: async () => check((await ask(FRANCE)).content[0].text === PARIS),
  stream: async () => {
    const pieces = [];
    const stream = client.beta.messages.stream({ ...asked, messages: [{ role: "user", content: FRANCE }] });
    stream.on("text", (text) => pieces.push(text));
    const { content } = await stream.finalMessage();
    check(pieces.length > 3 && pieces.join("") === PARIS && content[0].text === PARIS, pieces);
  },
  tools: async () => {
    const call = (await ask(WEATHER, { tools: [{ ...weather, input_schema: CITY }] })).content.at(-1);
    check(call.name === "get_weather" && call.input.city === "Paris", call);
  },
  "tool loop": async () => {
    for (const stream of [false, true]) {
      const threaded = await loop({ stream });
      check(threaded === '[["create",200],["continue",200]]', threaded);
      const whole = await loop({ stream, thread: false });
      check(whole === "[[null,200],[null,200]]", whole);
    }
  },
  "JSON schema": async () => {
    const { content } = await ask(PERSON, { output_config: { format: { type: "json_schema", schema: SCHEMA } } });
    check([7, 8].includes(JSON.parse(content[0].text).age), content);
  },
});
