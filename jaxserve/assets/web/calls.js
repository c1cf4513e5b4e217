// Tool calls of an answer: collected from the stream, shown with a field for each result, and sent back.

import { folded, made } from "./page.js";

const PARTS = ["id", "name", "arguments", "result"];
export const isCall = (call) => PARTS.every((part) => typeof call?.[part] === "string");

export function addCall(calls, { index, id = "", function: part = {} }) {
  while (calls.length <= index) calls.push({ id: "", name: "", arguments: "", result: "" });
  calls[index].id += id;
  calls[index].name += part.name ?? "";
  calls[index].arguments += part.arguments ?? "";
}

// Returns the messages of the request for one of the conversation: a tool message for each call follows it.
export function sentForm({ role, content, pictures = [], calls = [] }) {
  const seen = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  if (seen.length) return [{ role, content: content ? [...seen, { type: "text", text: content }] : seen }];
  if (!calls.length) return [{ role, content }];
  const named = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  const results = calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result }));
  return [{ role, content, tool_calls: named }, ...results];
}

export function callNode(call, isLast) {
  const node = folded(`Tool call: ${call.name}`, call.arguments, true);
  if (isLast) {
    const field = made("textarea", { value: call.result, placeholder: "Result", rows: 2 });
    field.addEventListener("input", () => (call.result = field.value));
    node.append(field);
  } else if (call.result) node.append(made("div", { textContent: `Result: ${call.result}` }));
  return node;
}
