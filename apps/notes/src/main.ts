// The page: a list, an editor, and keys for both.

import "../../shared/base.css";
import "./style.css";
import { type BridgeError, signInAgain } from "../../shared/bridge";
import { el, icon, isTyping, News, plural } from "../../shared/ui";
import type { Note } from "./note";
import { Store } from "./store";

const find = <T extends HTMLElement>(id: string) => document.getElementById(id) as T;
const [page, list, empty, editor, nothing] = ["app", "list", "empty", "editor", "nothing"].map((id) => find(id));
const search = find<HTMLInputElement>("search");
const title = find<HTMLInputElement>("title");
const body = find<HTMLTextAreaElement>("body");
const [state, live] = [find("state"), find("live")];
const [pin, remove, back, fresh] = ["pin", "delete", "back", "new"].map((id) => find<HTMLButtonElement>(id));
pin!.append(icon("pin"));
remove!.append(icon("trash"));
back!.append(icon("back"));
fresh!.prepend(icon("plus"));

const news = new News(document.body);
const rows = new Map<string, HTMLLIElement>();
let open: Note | null = null;

const store = new Store({
  changed(note) {
    if (store.isSettled) news.settle();
    render();
    if (open && (note === null || note === open)) renderEditor();
  },
  failed: (_note, error) => tell(error),
  split(original, copy) {
    news.settle();
    if (open === original) show(copy);
    news.tell("This note was changed elsewhere at the same time. Both versions are kept.");
  },
  live(is) {
    live.hidden = !is;
  },
});

function tell(error: BridgeError): void {
  if (error.why === "session") {
    news.warn("You are signed out. Copy what is not saved before you go on.", { label: "Sign in", act: signInAgain });
  } else if (!store.isLoaded) {
    news.warn(`Your notes cannot be read: ${error.message}`, { label: "Try again", act: () => store.retry() });
  } else {
    news.warn(`Not saved yet: ${error.message}`, { label: "Try again", act: () => store.retry() });
  }
}

function show(note: Note | null, focus?: HTMLElement): void {
  const before = open;
  open = note;
  if (before && before !== note) store.dropIfEmpty(before);
  page!.dataset.view = note ? "note" : "list";
  render();
  renderEditor(true);
  focus?.focus();
}

function renderEditor(anew = false): void {
  if (open && !store.get(open.id)) open = null;
  editor!.hidden = open === null;
  nothing!.hidden = open !== null;
  if (!open) {
    page!.dataset.view = "list";
    return;
  }
  const { content, saving, isDirty } = open;
  // A field that says the same already keeps its cursor.
  if (anew || title.value !== content.title) title.value = content.title;
  if (anew || body.value !== content.body) body.value = content.body;
  pin!.setAttribute("aria-pressed", String(content.pinned));
  state.textContent = saving === "failed" ? "Not saved" : isDirty || saving === "running" ? "Saving…" : "Saved";
  state.dataset.kind = saving;
  if (open.saved === null && !isDirty) state.textContent = "";
}

function render(): void {
  const words = search.value.trim();
  const shown = store.all().filter((note) => note === open || words === "" || note.matches(words));
  const ids = new Set(shown.map((note) => note.id));
  for (const [id, row] of rows) {
    if (ids.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  shown.forEach((note, at) => {
    const row = rows.get(note.id) ?? made(note.id);
    paint(row, note);
    // Moved only where it has to be: a row that is moved loses the focus.
    if (list!.children[at] !== row) list!.insertBefore(row, list!.children[at] ?? null);
  });
  empty!.hidden = shown.length > 0 || !store.isLoaded;
  empty!.textContent = words ? "No note has these words." : "No notes yet. Press N to write one.";
}

function made(id: string): HTMLLIElement {
  const button = el("button", { type: "button", className: "note" });
  button.append(el("strong"), el("span", { className: "preview" }), el("time"));
  button.onclick = () => {
    const note = store.get(id);
    if (note) show(note, body);
  };
  const row = el("li", {}, button);
  row.dataset.id = id;
  rows.set(id, row);
  return row;
}

function paint(row: HTMLLIElement, note: Note): void {
  const button = row.firstElementChild as HTMLButtonElement;
  const [heading, preview, time] = button.children as unknown as [HTMLElement, HTMLElement, HTMLTimeElement];
  const write = (element: HTMLElement, text: string) => element.textContent === text || (element.textContent = text);
  write(heading, note.heading);
  write(preview, note.saving === "failed" ? "Not saved yet" : note.preview.slice(0, 140) || "No more text");
  time.dateTime = note.updatedAt;
  write(time, when(note.updatedAt));
  button.toggleAttribute("data-pinned", note.content.pinned);
  button.toggleAttribute("data-failed", note.saving === "failed");
  if (note === open) button.setAttribute("aria-current", "true");
  else button.removeAttribute("aria-current");
}

function when(at: string): string {
  const date = new Date(at);
  const today = date.toDateString() === new Date().toDateString();
  return today
    ? date.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

function create(): void {
  search.value = "";
  show(store.create(), title);
}

function discard(note: Note): void {
  const shown = store.all();
  const next = shown[shown.indexOf(note) + 1] ?? shown[shown.indexOf(note) - 1];
  const restore = store.remove(note);
  if (open === note) show(null);
  (rows.get(next?.id ?? "")?.firstElementChild as HTMLElement | null ?? fresh)?.focus();
  news.tell(`“${note.heading.slice(0, 40)}” is deleted.`, { label: "Undo", act: restore });
}

title.oninput = () => open && store.edit(open, { title: title.value });
body.oninput = () => open && store.edit(open, { body: body.value });
pin!.onclick = () => open && store.edit(open, { pinned: !open.content.pinned });
remove!.onclick = () => open && discard(open);
fresh!.onclick = create;
search.oninput = () => {
  render();
  list!.setAttribute("aria-label", search.value.trim() ? plural(rows.size, "note found", "notes found") : "Notes");
};
back!.onclick = () => leave();
editor!.onsubmit = (event) => event.preventDefault();
title.onkeydown = (event) => {
  if (event.key !== "Enter" || event.isComposing) return;
  event.preventDefault();
  body.focus();
};

function leave(): void {
  const id = open?.id ?? "";
  show(null);
  ((rows.get(id)?.firstElementChild as HTMLElement | null) ?? fresh)?.focus();
}

function step(by: number): void {
  const buttons = [...list!.querySelectorAll("button")];
  const at = buttons.indexOf(document.activeElement as HTMLButtonElement);
  const to = at < 0 ? (by > 0 ? 0 : buttons.length - 1) : Math.min(buttons.length - 1, Math.max(0, at + by));
  buttons[to]?.focus();
}

addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  const inList = list!.contains(document.activeElement);
  if (event.key === "Escape" && editor!.contains(document.activeElement)) leave();
  else if (event.key === "Escape" && document.activeElement === search) {
    search.value = "";
    render();
  } else if (event.key === "ArrowDown" && document.activeElement === search) step(1);
  else if (isTyping(event)) return;
  else if (event.key === "n") create();
  else if (event.key === "/") search.focus();
  else if (event.key === "ArrowDown") step(1);
  else if (event.key === "ArrowUp") step(-1);
  else if (event.key === "Delete" && inList) {
    const note = store.get((document.activeElement!.parentElement as HTMLElement).dataset.id ?? "");
    if (note) discard(note);
  } else return;
  event.preventDefault();
});

live.hidden = true;
renderEditor();
store.start();
