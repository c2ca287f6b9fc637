// The tasks app's page: the form for new tasks, the list, and keyboard shortcuts.

import "../../shared/base.css";
import "./style.css";
import { type BridgeError, signInAgain } from "../../shared/bridge";
import { el, icon, isTyping, pluralize, Toast } from "../../shared/ui";
import { Store, type Task } from "./store";

const byId = <T extends HTMLElement>(id: string) => document.getElementById(id) as T;
const list = byId("list");
const emptyMessage = byId("empty");
const counts = byId("counts");
const liveIndicator = byId("live");
const form = byId<HTMLFormElement>("add");
const titleInput = byId<HTMLInputElement>("title");
const dueInput = byId<HTMLInputElement>("due");
const deleteCompletedButton = byId("delete-completed");
byId("submit").prepend(icon("plus"));

const toast = new Toast(document.body);
const items = new Map<string, HTMLLIElement>();
/** The ids of tasks that were checked or unchecked. They stay listed until the filter changes, to make undoing easy. */
const recentlyToggled = new Set<string>();
let filter: "open" | "done" | "all" = "open";

const store = new Store({
  onChange() {
    if (store.isHealthy) toast.dismissWarning();
    render();
  },
  onError(error) {
    showError(store.isLoaded ? "Not saved yet" : "Could not load your tasks", error, () => store.retry());
  },
  onDeleteError(tasks, error) {
    const deletedLabel = tasks.length === 1 ? "the task" : pluralize(tasks.length, "task");
    showError(`Could not delete ${deletedLabel}`, error, () => deleteTasks(tasks));
  },
  onConnectionChange(isConnected) {
    liveIndicator.hidden = !isConnected;
  },
});

function showError(summary: string, error: BridgeError, retry: () => void): void {
  if (error.kind === "signed-out") {
    const signIn = { label: "Sign in", run: signInAgain };
    toast.warn("You are signed out. Changes to tasks marked “Not saved” are lost when you sign in again.", signIn);
  } else {
    toast.warn(`${summary}: ${error.message}`, { label: "Try again", run: retry });
  }
}

function isListed(task: Task): boolean {
  return filter === "all" || task.done === (filter === "done") || recentlyToggled.has(task.id);
}

function render(): void {
  const tasks = store.sortedTasks();
  const listedTasks = tasks.filter(isListed);
  const ids = new Set(listedTasks.map((task) => task.id));
  for (const [id, item] of items) {
    if (ids.has(id)) continue;
    item.remove();
    items.delete(id);
  }
  listedTasks.forEach((task, index) => {
    const item = items.get(task.id) ?? createItem(task.id);
    updateItem(item, task);
    if (list.children[index] === item) return;
    // An element loses the focus when it is moved.
    const focused = item.contains(document.activeElement) ? (document.activeElement as HTMLElement) : null;
    list.insertBefore(item, list.children[index] ?? null);
    focused?.focus();
  });
  const doneCount = tasks.filter((task) => task.done).length;
  counts.textContent = store.isLoaded ? `${tasks.length - doneCount} open, ${doneCount} done` : "";
  deleteCompletedButton.hidden = doneCount === 0 || filter === "open";
  emptyMessage.hidden = listedTasks.length > 0 || !store.isLoaded;
  emptyMessage.textContent = {
    open: "Nothing to do. Press N to add a task.",
    done: "No completed tasks yet.",
    all: "No tasks yet.",
  }[filter];
}

function createItem(id: string): HTMLLIElement {
  const checkbox = el("input", { type: "checkbox", className: "check" });
  const text = el("input", { className: "text", autocomplete: "off", maxLength: 500, "aria-label": "Title" });
  const date = el("input", { type: "date", className: "date", "aria-label": "Due date" });
  const saveStatus = el("span", { className: "save-status" });
  const deleteButton = el("button", { type: "button", className: "button quiet square" }, icon("trash"));
  const item = el("li", { className: "task" }, checkbox, text, saveStatus, date, deleteButton);
  item.dataset.id = id;
  checkbox.onchange = () => {
    const task = store.get(id);
    if (!task) return;
    recentlyToggled.add(id);
    store.edit(task, { done: checkbox.checked });
  };
  text.onchange = () => {
    const task = store.get(id);
    const title = text.value.trim();
    if (task && title && title !== task.title) store.edit(task, { title });
    else if (task) text.value = task.title;
  };
  text.onkeydown = (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    if (event.key === "Escape") text.value = store.get(id)?.title ?? text.value;
    event.preventDefault();
    checkbox.focus();
  };
  date.onchange = () => {
    const task = store.get(id);
    if (task) store.edit(task, { due: date.value || null });
  };
  deleteButton.onclick = () => {
    const task = store.get(id);
    if (task) deleteTasks([task]);
  };
  items.set(id, item);
  return item;
}

function updateItem(item: HTMLLIElement, task: Task): void {
  const [checkbox, text, saveStatus, date, deleteButton] = item.children as unknown as [
    HTMLInputElement, HTMLInputElement, HTMLElement, HTMLInputElement, HTMLButtonElement,
  ];
  checkbox.checked = task.done;
  checkbox.setAttribute("aria-label", `Done: ${task.title}`);
  // Do not overwrite the field that the user is editing.
  if (document.activeElement !== text) text.value = task.title;
  if (document.activeElement !== date) date.value = task.due ?? "";
  saveStatus.textContent = task.hasFailed ? "Not saved" : "";
  deleteButton.setAttribute("aria-label", `Delete: ${task.title}`);
  item.toggleAttribute("data-done", task.done);
  item.toggleAttribute("data-dated", task.due !== null);
  item.toggleAttribute("data-overdue", !task.done && task.due !== null && task.due < today());
}

/** Returns the local date in the format of `due`. */
function today(): string {
  const now = new Date();
  const pad = (number: number) => String(number).padStart(2, "0");
  return `${now.getFullYear()}-${pad(now.getMonth() + 1)}-${pad(now.getDate())}`;
}

function deleteTasks(tasks: Task[]): void {
  const listedIds = store.sortedTasks().map((task) => task.id).filter((id) => items.has(id));
  const index = listedIds.indexOf(tasks[0]?.id ?? "");
  const remainingIds = listedIds.filter((id) => !tasks.some((task) => task.id === id));
  const restore = store.remove(tasks);
  const nextItem = items.get(remainingIds[Math.min(index, remainingIds.length - 1)] ?? "");
  const checkbox = nextItem?.firstElementChild as HTMLElement | undefined;
  (checkbox ?? titleInput).focus();
  const deletedLabel = tasks.length === 1 ? `“${tasks[0]!.title.slice(0, 40)}”` : pluralize(tasks.length, "task");
  toast.show(`Deleted ${deletedLabel}.`, { label: "Undo", run: restore });
}

function moveFocus(offset: 1 | -1): void {
  const item = (document.activeElement as HTMLElement | null)?.closest<HTMLElement>(".task");
  const listed = [...list.children] as HTMLElement[];
  const target = item ? listed[listed.indexOf(item) + offset] : listed[offset > 0 ? 0 : listed.length - 1];
  if (target) (target.firstElementChild as HTMLElement).focus();
  else if (offset < 0) titleInput.focus();
}

form.onsubmit = (event) => {
  event.preventDefault();
  const title = titleInput.value.trim();
  if (title === "") return titleInput.focus();
  store.add({ title, done: false, due: dueInput.value || null });
  titleInput.value = "";
  dueInput.value = "";
  titleInput.focus();
};

for (const radio of document.querySelectorAll<HTMLInputElement>("[name=show]")) {
  radio.onchange = () => {
    filter = radio.value as typeof filter;
    recentlyToggled.clear();
    render();
  };
}

deleteCompletedButton.onclick = () => deleteTasks(store.sortedTasks().filter((task) => task.done));

addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  const focused = document.activeElement as HTMLElement;
  const item = focused.closest<HTMLElement>(".task");
  const isToggle = ["checkbox", "radio"].includes(focused.getAttribute("type") ?? "");
  const isInText = isTyping(event) && !isToggle;
  const isInTaskTitle = focused.className === "text";
  if (event.key === "ArrowDown" && (!isInText || focused === titleInput || isInTaskTitle)) moveFocus(1);
  else if (event.key === "ArrowUp" && (!isInText || isInTaskTitle)) moveFocus(-1);
  else if (isInText) return;
  else if (event.key === "n") titleInput.focus();
  else if (event.key === "Enter" && item && focused.className === "check") {
    (item.children[1] as HTMLInputElement).select();
  } else if (event.key === "Delete" && item) {
    const task = store.get(item.dataset.id ?? "");
    if (task) deleteTasks([task]);
  } else return;
  event.preventDefault();
});

liveIndicator.hidden = true;
store.start();
