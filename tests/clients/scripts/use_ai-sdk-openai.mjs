// Vercel's provider for OpenAI, which speaks Responses; use_ai.mjs has the one for chat completions.
import { createOpenAI } from "@ai-sdk/openai";
import { embedMany, generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

import { CITY, FRANCE, PARIS, PERSON, RESULT, SCHEMA, URL, WEATHER, check, report } from "./common.mjs";

const provider = createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
const fields = { model: provider.responses("demo"), temperature: 0, maxRetries: 0 };
const get_weather = { description: "The weather in a city", inputSchema: jsonSchema(CITY) };

await report("@ai-sdk/openai", {
  text: async () => check((await generateText({ ...fields, prompt: FRANCE })).text === PARIS),
  stream: async () => {
    const kinds = [];
    const answer = streamText({ ...fields, prompt: FRANCE });
    for await (const part of answer.fullStream) kinds.push(part.type);
    check(kinds.filter((kind) => kind === "text-delta").length > 3 && (await answer.text) === PARIS, kinds);
  },
  tools: async () => {
    const given = { tools: { get_weather: tool(get_weather) }, toolChoice: { type: "tool", toolName: "get_weather" } };
    const { toolCalls } = await generateText({ ...fields, prompt: WEATHER, ...given });
    check(toolCalls.length === 1 && toolCalls[0].input.city === "Paris", toolCalls);
  },
  "tool loop": async () => {
    const tools = { get_weather: tool({ ...get_weather, execute: async () => RESULT }) };
    const { text } = await generateText({ ...fields, prompt: WEATHER, tools, stopWhen: stepCountIs(3) });
    check(text.includes("sunny"), text);
  },
  "JSON schema": async () => {
    const { object } = await generateObject({ ...fields, prompt: PERSON, schema: jsonSchema(SCHEMA) });
    check([7, 8].includes(object.age), object);
  },
  embeddings: async () => {
    const { embeddings } = await embedMany({ model: provider.embedding("demo"), values: ["a cat", "a dog"], maxRetries: 0 });
    check(embeddings.length === 2 && embeddings[0].length > 1, embeddings);
  },
});
