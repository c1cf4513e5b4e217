// The chat: asks, shows the stream, and keeps the conversation.

import { stateOf, stream } from "./api.js";
import { addCall, callNode, sentForm } from "./calls.js";
import { render } from "./markdown.js";
import { button, byId, copyButton, download, folded, made, notice } from "./page.js";
import { hasSome, openPictures, shownSmall, taken } from "./pictures.js";
import * as talks from "./talks.js";

let talk = talks.search("")[0] ?? talks.newTalk();
let running = null; // the AbortController of the answer that comes

function requestBody(asked) {
  const number = (id) => (byId(id).value === "" ? {} : { [id]: Number(byId(id).value) });
  const system = byId("system").value ? [{ role: "system", content: byId("system").value }] : [];
  const tools = byId("tools").value.trim() ? { tools: readTools() } : {};
  const limits = ["temperature", "top_p", "max_tokens", "seed"].map(number);
  return Object.assign({ model: byId("models").value, messages: [...system, ...asked] }, tools, ...limits);
}

function readTools() {
  try {
    return JSON.parse(byId("tools").value);
  } catch {
    throw new Error("The tools in Settings are not JSON.");
  }
}

function fill(node, message, isLast = false) {
  const body = made("div", { className: "body" });
  if (message.role === "user") body.append(...(message.pictures ?? []).map(shownSmall), message.content);
  else body.append(render(message.content));
  const calls = (message.calls ?? []).map((each) => callNode(each, isLast));
  const thought = message.thinking ? [folded("Thinking", message.thinking, node.querySelector("details")?.open ?? false)] : [];
  const ended = message.ended ? [made("p", { className: message.failed ? "error" : "dim", textContent: message.ended })] : [];
  node.replaceChildren(...thought, body, ...calls, ...ended);
}

function tools(node, index, isLast) {
  const message = talk.messages[index];
  const again = () => answerTo(talks.parentOf(talk, index));
  const branch = () => choose(talks.branch(talk, index));
  const more = message.role === "user" ? [button("Edit", () => edit(node, index))] : [button("Regenerate", again)];
  if (isLast) {
    const next = () => answerTo(index);
    if (message.role === "user") more.push(button("Ask again", next));
    else if (message.calls) more.push(button("Send results", next));
  }
  return made("div", { className: "tools" }, copyButton(message.content), ...more, button("Branch", branch), ...versions(index));
}

// Returns the buttons that go to the version before and after, if there are several.
function versions(index) {
  const all = talks.versionsOf(talk, index);
  if (all.length === 1) return [];
  const at = all.indexOf(index);
  const step = (text, title, to) => Object.assign(button(text, () => {
    talks.showVersion(talk, to);
    keep(talk);
    show();
  }), { title, disabled: to === undefined });
  const place = made("span", { className: "dim", textContent: `${at + 1}/${all.length}` });
  return [step("‹", "Previous version", all[at - 1]), place, step("›", "Next version", all[at + 1])];
}

// Puts a field in the place of a question. Its text becomes another version of the question once it is sent.
function edit(node, index) {
  const field = made("textarea", { value: talk.messages[index].content, rows: 3 });
  field.setAttribute("aria-label", "Edited question");
  const send = () => {
    if (!field.value.trim() || running) return;
    const { pictures } = talk.messages[index];
    const edited = { role: "user", content: field.value.trim(), ...(pictures ? { pictures } : {}) };
    talks.add(talk, edited, talks.parentOf(talk, index));
    keep(talk);
    answerTo(talk.last);
  };
  field.addEventListener("keydown", (event) => {
    if (isSend(event)) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape") show();
  });
  node.replaceChildren(field, made("div", { className: "tools" }, button("Send", send), button("Cancel", show)));
  field.focus();
}

const isSend = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

function messageNode(index, isLast) {
  const message = talk.messages[index];
  const node = made("article", { className: `message ${message.role}` });
  fill(node, message, !running && isLast);
  if (!running) node.append(tools(node, index, isLast));
  return node;
}

function show() {
  const path = talks.shown(talk);
  byId("messages").replaceChildren(...path.map((each) => messageNode(each, each === path.at(-1))));
  byId("messages").scrollTop = byId("messages").scrollHeight;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  showTalks();
}

function showTalks() {
  byId("talks").replaceChildren(...talks.search(byId("search").value).map((each) => {
    const open = button(talks.titleOf(each), () => choose(each));
    open.className = "open";
    const remove = button("×", () => removeTalk(each.id));
    remove.title = "Delete";
    return made("li", { className: each.id === talk.id ? "here" : "" }, open, remove);
  }));
}

function removeTalk(id) {
  talks.remove(id);
  if (id !== talk.id) return showTalks();
  talk.messages.length = 0; // an answer that still runs does not bring it back
  choose(talks.newTalk());
}

function choose(other) {
  byId("side").classList.remove("open");
  if (other.id === talk.id) return;
  running?.abort();
  running = null;
  talk = other;
  show();
  byId("question").focus();
}

function keep(of) {
  if (!talks.put(of)) notice("This browser has no room for more conversations: export them and delete some.");
}

// Asks with the messages up to this one and streams the answer into a new message after it.
async function answerTo(index) {
  const own = talk;
  const before = own.last;
  const abort = new AbortController();
  const message = { role: "assistant", content: "" };
  const asked = talks.pathTo(own, index).map((each) => own.messages[each]).flatMap(sentForm);
  talks.add(own, message, index);
  running = abort;
  notice("");
  show();
  const node = byId("messages").lastElementChild;
  let due = 0;
  const draw = () => {
    due = 0;
    const list = byId("messages");
    const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
    fill(node, message);
    if (follows) list.scrollTop = list.scrollHeight;
  };
  let begun = false;
  try {
    const body = requestBody(asked);
    tellLoading(body.model, () => !begun && running === abort);
    for await (const chunk of stream(body, abort.signal)) {
      begun = true;
      add(message, chunk);
      // A long text takes longer to draw, so it is drawn less often.
      due ||= setTimeout(draw, Math.min(1000, 40 + message.content.length / 100));
    }
  } catch (error) {
    message.failed = error.name !== "AbortError";
    message.ended = message.failed ? `The answer is not whole: ${error.message}` : "stopped";
    if (message.failed) notice(error.message);
  }
  clearTimeout(due);
  const isEmpty = !message.content && !message.thinking && !message.calls;
  if (isEmpty && message.failed && own.messages.at(-1) === message) talks.takeBack(own, before);
  if (running === abort) running = null;
  keep(own);
  if (talk === own) show();
}

// While an answer has not begun, says once a second whether its model is being loaded.
async function tellLoading(model, isWaiting) {
  let told = false;
  for (;;) {
    await new Promise((done) => setTimeout(done, 1000));
    if (!isWaiting()) break;
    const state = await stateOf(model).catch(() => "");
    if (!isWaiting()) break;
    if (state) notice(`The model ${model} is ${state}.`, false);
    told ||= state !== "";
  }
  if (told) notice("");
}

function add(message, chunk) {
  for (const { delta = {}, finish_reason: reason } of chunk.choices ?? []) {
    if (delta.content) message.content += delta.content;
    if (delta.reasoning_content) message.thinking = (message.thinking ?? "") + delta.reasoning_content;
    for (const call of delta.tool_calls ?? []) addCall((message.calls ??= []), call);
    if (reason === "length") message.ended = "ended: the limit of tokens is reached";
  }
}

function ask(event) {
  event?.preventDefault();
  const question = byId("question").value.trim();
  if ((!question && !hasSome()) || running) return;
  byId("question").value = "";
  const asked = { role: "user", content: question, ...(hasSome() ? { pictures: taken() } : {}) };
  talks.add(talk, asked, talks.shown(talk).at(-1) ?? null);
  keep(talk);
  answerTo(talk.last);
}

export function openChat() {
  openPictures();
  byId("ask").addEventListener("submit", ask);
  byId("question").addEventListener("keydown", (event) => {
    if (isSend(event)) ask(event);
  });
  addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  byId("stop").addEventListener("click", () => running?.abort());
  byId("new").addEventListener("click", () => choose(talks.newTalk()));
  byId("menu").addEventListener("click", () => byId("side").classList.toggle("open"));
  byId("search").addEventListener("input", showTalks);
  byId("export").addEventListener("click", () => download("conversations.json", new Blob([talks.exported()])));
  byId("import").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    if (file && !talks.importText(await file.text())) notice(`${file.name} has no conversations of this page.`);
    event.target.value = "";
    showTalks();
  });
  show();
}
