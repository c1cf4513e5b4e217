// Files and batches: upload, start, progress, download, cancel.

import { call } from "./api.js";
import { button, byId, download, made, notice } from "./page.js";

const SHOWN_ERRORS = 20;

// Where several models are served, each has files of its own, which are asked for by the model of Settings.
const address = (path) => {
  const { length, value } = byId("models");
  return length > 1 ? `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(value)}` : path;
};
const run = (action) => () => action().then(refresh).catch((error) => notice(error.message));
const json = async (path, options) => (await call(path, options)).json();
const row = (name, ...cells) => made("tr", {}, ...cells.map((cell) => made(name, {}, cell)));
const when = (seconds) => new Date(1000 * seconds).toLocaleString();

async function save(id, name) {
  download(name, await (await call(address(`v1/files/${encodeURIComponent(id)}/content`))).blob());
}

function start(file) {
  const body = JSON.stringify({ input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" });
  return call(address("v1/batches"), { method: "POST", headers: { "Content-Type": "application/json" }, body });
}

function fileRow(file) {
  const actions = [button("Download", run(() => save(file.id, file.filename)))];
  if (file.purpose === "batch") actions.push(button("Start batch", run(() => start(file))));
  actions.push(button("Delete", run(() => call(address(`v1/files/${encodeURIComponent(file.id)}`), { method: "DELETE" }))));
  return row("td", file.filename, file.purpose, `${file.bytes} B`, when(file.created_at), made("div", { className: "row" }, ...actions));
}

// Returns the nodes that say why a batch failed, each with the line of the file that it is about.
function reasons(errors) {
  const told = errors.slice(0, SHOWN_ERRORS).map(({ line, message }) => (line ? `Line ${line}: ${message}` : message));
  if (errors.length > SHOWN_ERRORS) told.push(`and ${errors.length - SHOWN_ERRORS} more`);
  return told.map((textContent) => made("div", { className: "error", textContent }));
}

function batchRow(batch) {
  const { completed = 0, failed = 0, total = 0 } = batch.request_counts ?? {};
  const actions = [];
  if (batch.output_file_id) actions.push(button("Output", run(() => save(batch.output_file_id, `${batch.id}.jsonl`))));
  if (batch.error_file_id) actions.push(button("Errors", run(() => save(batch.error_file_id, `${batch.id}.errors.jsonl`))));
  if (["validating", "in_progress"].includes(batch.status)) {
    actions.push(button("Cancel", run(() => call(address(`v1/batches/${encodeURIComponent(batch.id)}/cancel`), { method: "POST" }))));
  }
  const done = made("progress", { max: Math.max(total, 1), value: completed + failed });
  const counts = made("span", {}, done, ` ${completed} of ${total}${failed ? `, ${failed} failed` : ""}`);
  const status = made("div", {}, batch.status, ...reasons(batch.errors?.data ?? []));
  return row("td", batch.id, status, counts, when(batch.created_at), made("div", { className: "row" }, ...actions));
}

async function refresh() {
  const [files, batches] = await Promise.all([json(address("v1/files?limit=100")), json(address("v1/batches?limit=100"))]);
  byId("file-table").replaceChildren(row("th", "Name", "Purpose", "Size", "Made", ""), ...files.data.map(fileRow));
  byId("batch-table").replaceChildren(row("th", "Batch", "Status", "Requests", "Made", ""), ...batches.data.map(batchRow));
}

async function upload(event) {
  const [file] = event.target.files;
  if (!file) return;
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file);
  byId("uploading").textContent = `${file.name} is sent ...`;
  try {
    await call(address("v1/files"), { method: "POST", body: form });
    notice("");
    await refresh();
  } catch (error) {
    notice(error.message);
  }
  byId("uploading").textContent = "";
  event.target.value = "";
}

export function openFiles() {
  byId("upload").onchange = upload;
  let ended = false;
  async function tick() {
    if (ended) return;
    // A tab that nobody sees asks for nothing, so that the model can be unloaded when it is idle.
    if (!document.hidden) await refresh().catch((error) => ended || notice(error.message));
    setTimeout(tick, 2000);
  }
  tick();
  return () => (ended = true);
}
