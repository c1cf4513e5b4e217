// The conversations, kept in this browser only.
//
// The messages of a conversation are a tree: `parent` is the index of the message that one follows, null for a first one.
// A message without `parent` follows the one before it in the list. Answers that were made again and questions that were
// edited are siblings. `last` is the index of the last message that is shown; without it that is the last of the list.

import { isCall } from "./calls.js";
import { isPicture } from "./pictures.js";

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

const isIndex = (number, end) => Number.isInteger(number) && number >= 0 && number < end;

function isTalk(talk) {
  return typeof talk?.id === "string" && Array.isArray(talk.messages) &&
    (talk.last === undefined || isIndex(talk.last, talk.messages.length)) &&
    talk.messages.every((each, index) => ["user", "assistant"].includes(each?.role) && typeof each.content === "string" &&
      ((each.parent ?? null) === null || isIndex(each.parent, index)) &&
      Array.isArray(each.pictures ?? []) && (each.pictures ?? []).every(isPicture) && Array.isArray(each.calls ?? []) && (each.calls ?? []).every(isCall));
}

export function parentOf(talk, index) {
  const { parent } = talk.messages[index];
  return parent === undefined && index > 0 ? index - 1 : parent ?? null;
}

// Returns the indices from the first message to this one.
export function pathTo(talk, index) {
  const path = [];
  for (let at = index; at !== null; at = parentOf(talk, at)) path.unshift(at);
  return path;
}

// Returns the indices of the messages that are shown.
export const shown = (talk) => (talk.messages.length ? pathTo(talk, talk.last ?? talk.messages.length - 1) : []);

// Adds a message after another one, or at the beginning (null), and shows it.
export function add(talk, message, parent) {
  talk.last = talk.messages.push(Object.assign(message, { parent })) - 1;
}

// Takes the newest message back and shows what was shown before it.
export function takeBack(talk, last) {
  talk.messages.pop();
  if (last === undefined) delete talk.last;
  else talk.last = last;
}

// Returns the indices of the versions of a message, itself among them.
export function versionsOf(talk, index) {
  const parent = parentOf(talk, index);
  return [...talk.messages.keys()].filter((each) => parentOf(talk, each) === parent);
}

// Shows a version of a message with the newest of what follows it.
export function showVersion(talk, index) {
  talk.last = index;
  for (let next = index; next >= 0; next = talk.messages.findLastIndex((_, each) => parentOf(talk, each) === talk.last)) {
    talk.last = next;
  }
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
export const titleOf = (talk) => talk.messages[shown(talk)[0]]?.content.slice(0, 60) || "New conversation";
export const exported = () => JSON.stringify(stored(), null, 1);

export function put(talk) {
  return !talk.messages.length || save([talk, ...stored().filter((each) => each.id !== talk.id)]);
}

// Returns a new conversation with the messages of another up to this one, without their other versions.
export function branch(talk, index) {
  const messages = pathTo(talk, index).map((each) => structuredClone(talk.messages[each]));
  for (const message of messages) delete message.parent;
  const copy = { id: newId(), messages };
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
