// Pictures of the next question: pasted or dropped, shown small, kept as data: URLs.

import { button, byId, made, notice } from "./page.js";

const KIND = /^image\/(png|jpeg|webp|gif)$/;
let attached = [];

export const isPicture = (url) => typeof url === "string" && /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/.test(url);
export const shownSmall = (url) => made("img", { className: "picture", src: url, alt: "Picture" });

// Returns the pictures of the next question, which then has none.
export function taken() {
  const found = attached;
  attached = [];
  show();
  return found;
}

export const hasSome = () => attached.length > 0;

function show() {
  byId("attached").replaceChildren(...attached.map((url, index) => {
    const remove = button("×", () => {
      attached.splice(index, 1);
      show();
    });
    remove.title = "Remove the picture";
    return made("span", {}, shownSmall(url), remove);
  }));
}

function add(files) {
  for (const file of files) {
    if (!KIND.test(file.type)) {
      notice(`${file.name} is no PNG, JPEG, WebP or GIF.`);
      continue;
    }
    const reader = new FileReader();
    reader.onload = () => {
      attached.push(reader.result);
      show();
    };
    reader.readAsDataURL(file);
  }
}

export function openPictures() {
  byId("question").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  });
  byId("talk").addEventListener("dragover", (event) => event.preventDefault());
  byId("talk").addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
}
