// The page: tabs, settings and keyboard. Each tab has a module of its own.

import { call, getKey, isKept, setKey } from "./api.js";
import { openChat } from "./chat.js";
import { openFiles } from "./files.js";
import { openLive } from "./live.js";
import { byId, notice } from "./page.js";

const TABS = { chat: () => {}, live: openLive, files: openFiles };
const FIELDS = ["system", "tools", "temperature", "top_p", "max_tokens", "seed"];
let close = null;

function show() {
  const name = location.hash.slice(1) in TABS ? location.hash.slice(1) : "chat";
  for (const tab of Object.keys(TABS)) byId(tab).hidden = tab !== name;
  byId("menu").hidden = name !== "chat";
  for (const link of document.querySelectorAll("nav a")) link.classList.toggle("here", link.hash === `#${name}`);
  close?.();
  notice("");
  close = TABS[name]();
  scrollTo(0, 0);
}

async function loadModels() {
  try {
    const { data } = await (await call("v1/models")).json();
    const kept = localStorage.getItem("jaxserve.model");
    byId("models").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === kept)));
    byId("model").textContent = byId("models").value;
    notice("");
  } catch (error) {
    const isLoading = error.status === 503; // the engine starts, maybe again
    notice(error.message, !isLoading);
    if (isLoading) setTimeout(loadModels, 2000);
  }
}

function openSettings() {
  byId("key").value = getKey();
  byId("keep-key").checked = isKept();
  byId("settings").showModal();
}

function closeSettings() {
  setKey(byId("key").value, byId("keep-key").checked);
  if (byId("models").value) localStorage.setItem("jaxserve.model", byId("models").value);
  localStorage.setItem("jaxserve.settings", JSON.stringify(Object.fromEntries(FIELDS.map((id) => [id, byId(id).value]))));
  loadModels();
}

const settings = JSON.parse(localStorage.getItem("jaxserve.settings") ?? "{}");
for (const id of FIELDS) byId(id).value = settings[id] ?? "";
byId("settings-open").addEventListener("click", openSettings);
byId("settings").addEventListener("close", closeSettings);
addEventListener("hashchange", show);
openChat();
show();
loadModels();
