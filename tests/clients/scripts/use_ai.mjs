import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

import { CITY, FRANCE, PARIS, PERSON, RESULT, SCHEMA, URL, WEATHER, check, report } from "./common.mjs";

const provider = createOpenAICompatible({
  name: "jaxserve",
  baseURL: `${URL}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const fields = { model: provider("demo"), temperature: 0, maxRetries: 0 };
const get_weather = { description: "The weather in a city", inputSchema: jsonSchema(CITY) };

await report("ai", {
  text: async () => check((await generateText({ ...fields, prompt: FRANCE })).text === PARIS),
  stream: async () => {
    const pieces = [];
    for await (const piece of streamText({ ...fields, prompt: FRANCE }).textStream) pieces.push(piece);
    check(pieces.length > 3 && pieces.join("") === PARIS, pieces);
  },
  tools: async () => {
    const { toolCalls } = await generateText({ ...fields, prompt: WEATHER, tools: { get_weather: tool(get_weather) } });
    check(toolCalls[0].input.city === "Paris", toolCalls);
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
    const { embeddings } = await embedMany({ model: provider.embeddingModel("demo"), values: ["a cat", "a dog"], maxRetries: 0 });
    check(embeddings.length === 2 && embeddings[0].length > 1, embeddings);
  },
});
