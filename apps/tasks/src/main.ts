// The page: a line to add to, a list, and keys for both.

import "../../shared/base.css";
import "./style.css";
import { type BridgeError, signInAgain } from "../../shared/bridge";
import { el, icon, isTyping, News, plural } from "../../shared/ui";
import { Store, type Task } from "./store";

const find = <T extends HTMLElement>(id: string) => document.getElementById(id) as T;
const [list, empty, count, live] = ["list", "empty", "count", "live"].map((id) => find(id));
const form = find<HTMLFormElement>("add");
const [title, due] = ["title", "due"].map((id) => find<HTMLInputElement>(id));
const clear = find<HTMLButtonElement>("clear");
find("submit").prepend(icon("plus"));

const news = new News(document.body);
const rows = new Map<string, HTMLLIElement>();
/** Done here just now: it stays in sight until the next look, so that a slip can be taken back. */
const lingering = new Set<string>();
let wanted: "open" | "done" | "all" = "open";

const store = new Store({
  changed() {
    if (store.isSettled) news.settle();
    render();
  },
  failed: (error) => tell(error),
  live(is) {
    live!.hidden = !is;
  },
});

function tell(error: BridgeError): void {
  if (error.why === "session") {
    news.warn("You are signed out; what is marked is not saved.", { label: "Sign in", act: signInAgain });
  } else if (!store.isLoaded) {
    news.warn(`Your tasks cannot be read: ${error.message}`, { label: "Try again", act: () => store.retry() });
  } else {
    news.warn(`Not saved yet: ${error.message}`, { label: "Try again", act: () => store.retry() });
  }
}

function isShown(task: Task): boolean {
  return wanted === "all" || task.done === (wanted === "done") || lingering.has(task.id);
}

function render(): void {
  const all = store.all();
  const shown = all.filter(isShown);
  const ids = new Set(shown.map((task) => task.id));
  for (const [id, row] of rows) {
    if (ids.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  shown.forEach((task, at) => {
    const row = rows.get(task.id) ?? made(task.id);
    paint(row, task);
    if (list!.children[at] === row) return;
    // A row that is moved loses the focus.
    const focused = row.contains(document.activeElement) ? (document.activeElement as HTMLElement) : null;
    list!.insertBefore(row, list!.children[at] ?? null);
    focused?.focus();
  });
  const done = all.filter((task) => task.done).length;
  count!.textContent = store.isLoaded ? `${all.length - done} open, ${done} done` : "";
  clear.hidden = done === 0 || wanted === "open";
  empty!.hidden = shown.length > 0 || !store.isLoaded;
  empty!.textContent = { open: "Nothing to do. Press N to add a task.", done: "Nothing done yet.", all: "No tasks yet." }[wanted];
}

function made(id: string): HTMLLIElement {
  const check = el("input", { type: "checkbox", className: "check" });
  const text = el("input", { className: "text", autocomplete: "off", maxLength: 500, "aria-label": "Title" });
  const date = el("input", { type: "date", className: "date", "aria-label": "Due date" });
  const mark = el("span", { className: "mark" });
  const remove = el("button", { type: "button", className: "button quiet square" }, icon("trash"));
  const row = el("li", { className: "task" }, check, text, mark, date, remove);
  row.dataset.id = id;
  const task = () => store.get(id);
  check.onchange = () => {
    const one = task();
    if (!one) return;
    lingering.add(id);
    store.edit(one, { done: check.checked });
  };
  text.onchange = () => {
    const one = task();
    const words = text.value.trim();
    if (one && words && words !== one.title) store.edit(one, { title: words });
    else if (one) text.value = one.title;
  };
  text.onkeydown = (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    if (event.key === "Escape") text.value = task()?.title ?? text.value;
    event.preventDefault();
    check.focus();
  };
  date.onchange = () => {
    const one = task();
    if (one) store.edit(one, { due: date.value || null });
  };
  remove.onclick = () => {
    const one = task();
    if (one) discard([one]);
  };
  rows.set(id, row);
  return row;
}

function paint(row: HTMLLIElement, task: Task): void {
  const [check, text, mark, date, remove] = row.children as unknown as [
    HTMLInputElement, HTMLInputElement, HTMLElement, HTMLInputElement, HTMLButtonElement,
  ];
  check.checked = task.done;
  check.setAttribute("aria-label", `Done: ${task.title}`);
  // What is being written is not overwritten.
  if (document.activeElement !== text) text.value = task.title;
  if (document.activeElement !== date) date.value = task.due ?? "";
  mark.textContent = task.hasFailed ? "Not saved" : "";
  remove.setAttribute("aria-label", `Delete: ${task.title}`);
  row.toggleAttribute("data-done", task.done);
  row.toggleAttribute("data-dated", task.due !== null);
  row.toggleAttribute("data-late", !task.done && task.due !== null && task.due < today());
}

function today(): string {
  const now = new Date();
  const two = (number: number) => String(number).padStart(2, "0");
  return `${now.getFullYear()}-${two(now.getMonth() + 1)}-${two(now.getDate())}`;
}

function discard(tasks: Task[]): void {
  const shown = [...rows.keys()];
  const order = store.all().map((task) => task.id).filter((id) => shown.includes(id));
  const at = order.indexOf(tasks[0]?.id ?? "");
  const rest = order.filter((id) => !tasks.some((task) => task.id === id));
  const restore = store.remove(tasks);
  const next = rows.get(rest[Math.min(at, rest.length - 1)] ?? "");
  ((next?.firstElementChild as HTMLElement | null) ?? title)?.focus();
  const what = tasks.length === 1 ? `“${tasks[0]!.title.slice(0, 40)}” is` : `${plural(tasks.length, "task")} are`;
  news.tell(`${what} deleted.`, { label: "Undo", act: restore });
}

form.onsubmit = (event) => {
  event.preventDefault();
  const words = title!.value.trim();
  if (words === "") return title!.focus();
  store.add({ title: words, done: false, due: due!.value || null });
  title!.value = "";
  due!.value = "";
  title!.focus();
};

for (const radio of document.querySelectorAll<HTMLInputElement>("[name=show]")) {
  radio.onchange = () => {
    wanted = radio.value as typeof wanted;
    lingering.clear();
    render();
  };
}

clear.onclick = () => discard(store.all().filter((task) => task.done));

function step(by: number): void {
  const row = (document.activeElement as HTMLElement | null)?.closest<HTMLElement>(".task");
  const all = [...list!.children] as HTMLElement[];
  const to = row ? all[all.indexOf(row as HTMLLIElement) + by] : all[by > 0 ? 0 : all.length - 1];
  if (to) (to.firstElementChild as HTMLElement).focus();
  else if (by < 0) title!.focus();
}

addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  const focused = document.activeElement as HTMLElement;
  const row = focused.closest<HTMLElement>(".task");
  const isText = isTyping(event) && focused.getAttribute("type") !== "checkbox" && focused.getAttribute("type") !== "radio";
  if (event.key === "ArrowDown" && (!isText || focused === title || focused.className === "text")) step(1);
  else if (event.key === "ArrowUp" && (!isText || focused.className === "text")) step(-1);
  else if (isText) return;
  else if (event.key === "n") title!.focus();
  else if (event.key === "Enter" && row && focused.className === "check") (row.children[1] as HTMLInputElement).select();
  else if (event.key === "Delete" && row) {
    const task = store.get(row.dataset.id ?? "");
    if (task) discard([task]);
  } else return;
  event.preventDefault();
});

live!.hidden = true;
store.start();
