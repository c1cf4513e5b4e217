// The live page: plots of the last two minutes, from /metrics alone.

import { call } from "./api.js";
import { byId, made, notice } from "./page.js";

const KEPT = 120;
const rate = (name) => (now, before, seconds) => (sum(now, name) - sum(before, name)) / seconds;
const PLOTS = [
  ["Tokens per second", rate("jaxserve:generation_tokens_total"), (value) => value.toFixed(0)],
  ["Prompt tokens per second", rate("jaxserve:prompt_tokens_total"), (value) => value.toFixed(0)],
  ["Time to first token", firstToken, (value) => `${(1000 * value).toFixed(0)} ms`],
  ["Running", (now) => sum(now, "jaxserve:num_requests_running"), String],
  ["Queue", (now) => sum(now, "jaxserve:num_requests_waiting"), String],
  ["KV pages in use", (now) => 100 * (now.get("max jaxserve:kv_cache_usage") ?? 0), (value) => `${value.toFixed(1)} %`],
  ["Prefix hits", hits, (value) => `${value.toFixed(0)} %`],
  ["Drafts accepted", drafts, (value) => `${value.toFixed(0)} %`, byPosition],
  ["Batch progress", batchProgress, (value) => `${value.toFixed(0)} %`],
  ["Memory of the API process", (now) => sum(now, "process_resident_memory_bytes") / 2 ** 20, (value) => `${value.toFixed(0)} MiB`],
];

// The sum of each metric over its labels, and with "max " before the name the largest: shares of several models do not add.
// What has a position is also summed for each of them, under the name and the position.
export function parse(text) {
  const found = new Map();
  for (const [, name, labels, value] of text.matchAll(/^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)/gm)) {
    const position = labels?.match(/[{,]position="(\d+)"/)?.[1];
    for (const each of position ? [name, `${name} ${position}`] : [name]) found.set(each, (found.get(each) ?? 0) + Number(value));
    found.set(`max ${name}`, Math.max(found.get(`max ${name}`) ?? -Infinity, Number(value)));
  }
  return found;
}

const sum = (metrics, name) => metrics.get(name) ?? 0;

// The mean of the interval; null where no request had its first token in it.
function firstToken(now, before) {
  const grown = (end) => sum(now, `jaxserve:time_to_first_token_seconds_${end}`) - sum(before, `jaxserve:time_to_first_token_seconds_${end}`);
  return grown("count") > 0 ? grown("sum") / grown("count") : null;
}

function hits(now, before) {
  const grown = (name) => sum(now, name) - sum(before, name);
  const asked = grown("jaxserve:prompt_tokens_total");
  return asked > 0 ? (100 * grown("jaxserve:cached_tokens_total")) / asked : null;
}

// Of the interval's drafts; null where there were none.
function drafts(now, before) {
  const grown = (name) => sum(now, `jaxserve:spec_decode_num_${name}_total`) - sum(before, `jaxserve:spec_decode_num_${name}_total`);
  return grown("draft_tokens") > 0 ? (100 * grown("accepted_tokens")) / grown("draft_tokens") : null;
}

// Of the rows with drafts so far, how many had the first draft right, the second, ..., and whether the draft model rests.
function byPosition(now, before) {
  const rest = "jaxserve:spec_decode_num_rest_steps_total";
  const rests = sum(now, rest) > sum(before, rest) ? "the draft model rests" : "";
  const rows = sum(now, "jaxserve:spec_decode_num_drafts_total");
  const shares = [];
  for (let at = 0, key; now.has((key = `jaxserve:spec_decode_num_accepted_tokens_per_pos_total ${at}`)); at += 1) {
    shares.push(((100 * now.get(key)) / rows).toFixed(0));
  }
  return [shares.length ? `by position ${shares.join(", ")} %` : "", rests].filter(Boolean).join("; ");
}

// Of the batches that run; null where none does.
function batchProgress(now) {
  const requests = sum(now, "jaxserve:batches_requests");
  return requests > 0 ? (100 * sum(now, "jaxserve:batches_requests_finished")) / requests : null;
}

function plot(title) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${KEPT} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  const line = document.createElementNS(svg.namespaceURI, "polyline");
  svg.append(line);
  const value = made("b", { textContent: "–" });
  const most = made("span", { className: "dim" });
  return { node: made("figure", {}, made("figcaption", { textContent: title }), value, svg, most), line, value, most, points: [] };
}

function draw(each, unit, detail) {
  const known = each.points.filter((point) => point !== null);
  const top = Math.max(...known, 1e-9);
  const first = KEPT - each.points.length;
  each.line.setAttribute("points", each.points.flatMap((point, at) =>
    point === null ? [] : [0, 1].map((edge) => `${first + at + edge},${98 - 96 * (point / top)}`)).join(" "));
  each.value.textContent = known.length ? unit(known.at(-1)) : "–";
  each.most.textContent = detail || (known.length ? `peak ${unit(Math.max(...known))}` : "");
}

export function openLive() {
  const plots = PLOTS.map(([title]) => plot(title));
  byId("plots").replaceChildren(...plots.map((each) => each.node));
  let before = null, last = 0, ended = false;
  async function tick() {
    try {
      const now = parse(await (await call("metrics")).text());
      const time = performance.now();
      if (before) PLOTS.forEach(([, read, unit, detail], at) => {
        const each = plots[at];
        each.points.push(read(now, before, (time - last) / 1000));
        each.points = each.points.slice(1 - KEPT);
        draw(each, unit, detail?.(now, before));
      });
      [before, last] = [now, time];
      if (!ended) notice("");
    } catch (error) {
      if (!ended) notice(error.message);
    }
    if (!ended) setTimeout(tick, 1000);
  }
  tick();
  return () => (ended = true);
}
