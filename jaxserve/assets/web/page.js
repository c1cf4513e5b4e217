// Helpers for the page's nodes.

export const byId = (id) => document.getElementById(id);

export function made(name, fields = {}, ...children) {
  const node = Object.assign(document.createElement(name), fields);
  node.append(...children);
  return node;
}

export function folded(title, text, open) {
  return made("details", { open }, made("summary", { textContent: title }), made("div", { textContent: text }));
}

export const button = (text, action) => {
  const node = made("button", { type: "button", textContent: text });
  node.addEventListener("click", action);
  return node;
};

// The clipboard's own interface is absent from pages that came over plain HTTP from another machine, and may be denied.
async function copy(text) {
  if (await navigator.clipboard?.writeText(text).then(() => true, () => false)) return;
  const area = made("textarea", { value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function copyButton(text) {
  const node = button("Copy", () => copy(text).then(() => (node.textContent = "Copied")));
  return node;
}

export function notice(text, isError = true) {
  byId("notice").className = isError ? "" : "wait";
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

export function download(name, blob) {
  const link = made("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
