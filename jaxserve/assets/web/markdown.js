// Renders a model's markdown into DOM nodes. Text only becomes text nodes and attributes are never taken from it except
// http(s) and mailto addresses of links, so nothing in it can become markup or run.

import { copyButton } from "./page.js";

// Each part is found in linear time: a run of backticks has bounded length and is looked at once, a link is bounded.
const INLINE = /(?<!`)(`{1,3})(?!`)([\s\S]*?[^`])\1(?!`)|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]{1,500})\]\(([^)\s]{1,2000})\)/g;

function node(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function link(text, address) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return document.createTextNode(`${text} (${address})`);
  const made = node("a", text);
  made.href = address;
  made.rel = "noopener noreferrer nofollow";
  made.target = "_blank";
  made.title = address;
  return made;
}

function inline(text) {
  const made = document.createDocumentFragment();
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    made.append(text.slice(last, match.index));
    const [whole, , code, strong, emphasis, label, address] = match;
    if (code !== undefined) made.append(node("code", code));
    else if (strong !== undefined) made.append(node("strong", strong));
    else if (emphasis !== undefined) made.append(node("em", emphasis));
    else made.append(link(label, address));
    last = match.index + whole.length;
  }
  made.append(text.slice(last));
  return made;
}

function codeBlock(text) {
  const made = node("div", node("pre", node("code", text)), copyButton(text));
  made.className = "code";
  return made;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
const ITEM = /^\s*(?:[-*+]|\d{1,9}[.)])\s+/;
const special = (line) => /^(\s*$|\s*```|#{1,6} |> ?|\s*\|.*\|\s*$)/.test(line) || ITEM.test(line);

function listItem(line) {
  const made = node("li", inline(line.replace(ITEM, "")));
  made.style.marginLeft = `${Math.min(/^\s*/.exec(line)[0].length, 16) / 2}em`;
  return made;
}

export function render(text) {
  const made = document.createDocumentFragment();
  const lines = text.split("\n");
  let at = 0;
  const take = (test) => {
    const first = at;
    while (at < lines.length && test(lines[at])) at++;
    return lines.slice(first, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) at++;
    else if (/^\s*```/.test(line)) {
      at++;
      const body = take((each) => !/^\s*```\s*$/.test(each));
      at++;
      made.append(codeBlock(body.join("\n")));
    } else if (/^#{1,6} /.test(line)) {
      const [, marks, title] = /^(#+) (.*)$/.exec(lines[at++]);
      made.append(node(`h${Math.min(marks.length + 1, 6)}`, inline(title)));
    } else if (/^> ?/.test(line)) {
      const quoted = take((each) => /^> ?/.test(each)).map((each) => each.replace(/^> ?/, ""));
      made.append(node("blockquote", inline(quoted.join("\n"))));
    } else if (/^\s*\|.*\|\s*$/.test(line)) {
      const rows = take((each) => /^\s*\|.*\|\s*$/.test(each)).filter((each) => !/^[\s|:-]+$/.test(each));
      made.append(node("table", ...rows.map((row, index) =>
        node("tr", ...cells(row).map((cell) => node(index ? "td" : "th", inline(cell)))))));
    } else if (ITEM.test(line)) {
      const ordered = /^\s*\d/.test(line);
      const items = take((each) => ITEM.test(each) && /^\s*\d/.test(each) === ordered);
      const list = node(ordered ? "ol" : "ul", ...items.map(listItem));
      if (ordered) list.start = parseInt(line, 10);
      made.append(list);
    } else {
      at++;
      made.append(node("p", inline([line, ...take((each) => !special(each))].join("\n"))));
    }
  }
  return made;
}
