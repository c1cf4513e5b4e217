// The conversations, kept in this browser only.

import { isCall } from "./calls.js";

const NAME = "jaxserve.talks";

// Read anew at each use: the page may be open in several tabs.
const stored = () => read(localStorage.getItem(NAME)) ?? [];

function read(text) {
  try {
    const found = JSON.parse(text);
    return Array.isArray(found) && found.every(isTalk) ? found : null;
  } catch {
    return null;
  }
}

function isTalk(talk) {
  return typeof talk?.id === "string" && Array.isArray(talk.messages) &&
    talk.messages.every((each) => ["user", "assistant"].includes(each?.role) && typeof each.content === "string" &&
      Array.isArray(each.calls ?? []) && (each.calls ?? []).every(isCall));
}

// Returns whether the browser kept them: its room is limited.
function save(talks) {
  try {
    localStorage.setItem(NAME, JSON.stringify(talks));
    return true;
  } catch {
    return false;
  }
}

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16)).join("");
export const newTalk = () => ({ id: newId(), messages: [] });
export const titleOf = (talk) => talk.messages[0]?.content.slice(0, 60) || "New conversation";
export const exported = () => JSON.stringify(stored(), null, 1);

export function put(talk) {
  return !talk.messages.length || save([talk, ...stored().filter((each) => each.id !== talk.id)]);
}

// Returns a new conversation that begins with the first messages of another.
export function branch(talk, count) {
  const copy = { id: newId(), messages: structuredClone(talk.messages.slice(0, count)) };
  put(copy);
  return copy;
}

export const remove = (id) => save(stored().filter((talk) => talk.id !== id));

export function search(words) {
  const wanted = words.toLowerCase();
  return stored().filter((talk) => talk.messages.some((each) => each.content.toLowerCase().includes(wanted)) || !wanted);
}

// Adds the conversations of an exported file. Returns whether it was one.
export function importText(text) {
  const found = read(text);
  if (!found) return false;
  const ids = new Set(found.map((talk) => talk.id));
  return save([...found, ...stored().filter((talk) => !ids.has(talk.id))]);
}
