import OpenAI from "openai";

import { CITY, FRANCE, PARIS, PERSON, RESULT, SCHEMA, URL, WEATHER, check, report } from "./common.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather in a city", parameters: CITY } }];
const ask = (content, fields) =>
  client.chat.completions.create({ model: "demo", temperature: 0, messages: [{ role: "user", content }], ...fields });

await report("openai", {
  text: async () => check((await ask(FRANCE)).choices[0].message.content === PARIS),
  stream: async () => {
    const pieces = [];
    for await (const chunk of await ask(FRANCE, { stream: true })) pieces.push(chunk.choices[0].delta.content ?? "");
    check(pieces.length > 3 && pieces.join("") === PARIS, pieces);
  },
  tools: async () => {
    const [call] = (await ask(WEATHER, { tools })).choices[0].message.tool_calls;
    check(JSON.parse(call.function.arguments).city === "Paris", call);
  },
  "tool loop": async () => {
    const runner = client.chat.completions.runTools({
      model: "demo",
      temperature: 0,
      messages: [{ role: "user", content: WEATHER }],
      tools: [{ type: "function", function: { ...tools[0].function, parse: JSON.parse, function: async () => RESULT } }],
    });
    const told = await runner.finalContent();
    check(told.includes("sunny"), told);
  },
  "JSON schema": async () => {
    const response_format = { type: "json_schema", json_schema: { name: "person", schema: SCHEMA, strict: true } };
    const person = JSON.parse((await ask(PERSON, { response_format })).choices[0].message.content);
    check([7, 8].includes(person.age), person);
  },
  logprobs: async () => {
    const found = (await ask(FRANCE, { logprobs: true, top_logprobs: 2 })).choices[0].logprobs.content;
    check(found[0].token === "The" && found[0].top_logprobs.length === 2, found[0]);
  },
  embeddings: async () => {
    const { data } = await client.embeddings.create({ model: "demo", input: ["a cat", "a dog"] });
    check(data.length === 2 && data[0].embedding.length > 1, data);
  },
});
