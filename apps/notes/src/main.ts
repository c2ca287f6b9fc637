// The notes app's page: the list, the editor, and keyboard shortcuts.

import "../../shared/base.css";
import "./style.css";
import { type BridgeError, signInAgain } from "../../shared/bridge";
import { el, icon, isTyping, pluralize, Toast } from "../../shared/ui";
import type { Note } from "./note";
import { Store } from "./store";

const byId = <T extends HTMLElement>(id: string) => document.getElementById(id) as T;
const app = byId("app");
const list = byId("list");
const emptyMessage = byId("empty");
const editor = byId("editor");
const placeholder = byId("placeholder");
const searchInput = byId<HTMLInputElement>("search");
const titleInput = byId<HTMLInputElement>("title");
const bodyInput = byId<HTMLTextAreaElement>("body");
const saveStatus = byId("save-status");
const liveIndicator = byId("live");
const pinButton = byId("pin");
const deleteButton = byId("delete");
const backButton = byId("back");
const newButton = byId("new");
pinButton.append(icon("pin"));
deleteButton.append(icon("trash"));
backButton.append(icon("back"));
newButton.prepend(icon("plus"));

const toast = new Toast(document.body);
const items = new Map<string, HTMLLIElement>();
let openNote: Note | null = null;

const store = new Store({
  onChange(note) {
    if (store.isHealthy) toast.dismissWarning();
    renderList();
    if (openNote && (note === null || note === openNote)) renderEditor();
  },
  onError(error) {
    showError(store.isLoaded ? "Not saved yet" : "Could not load your notes", error, () => store.retry());
  },
  onDeleteError(note, error) {
    showError("Could not delete the note", error, () => deleteNote(note));
  },
  onConflict(original, copy) {
    toast.dismissWarning();
    if (openNote === original) showNote(copy);
    toast.show("This note was also changed elsewhere. Both versions are kept.");
  },
  onConnectionChange(isConnected) {
    liveIndicator.hidden = !isConnected;
  },
});

function showError(summary: string, error: BridgeError, retry: () => void): void {
  if (error.kind === "signed-out") {
    const signIn = { label: "Sign in", run: signInAgain };
    toast.warn("You are signed out. Copy any unsaved text before you sign in again.", signIn);
  } else {
    toast.warn(`${summary}: ${error.message}`, { label: "Try again", run: retry });
  }
}

/** Opens a note in the editor, or closes the editor if `note` is `null`. */
function showNote(note: Note | null, focusTarget?: HTMLElement): void {
  const previous = openNote;
  openNote = note;
  if (previous && previous !== note) store.discardIfEmpty(previous);
  app.dataset.view = note ? "note" : "list";
  renderList();
  renderEditor({ isNewlyOpened: true });
  focusTarget?.focus();
}

function renderEditor({ isNewlyOpened = false } = {}): void {
  if (openNote && !store.get(openNote.id)) openNote = null;
  editor.hidden = openNote === null;
  placeholder.hidden = openNote !== null;
  if (!openNote) {
    app.dataset.view = "list";
    return;
  }
  const { content, saveState, isDirty } = openNote;
  // Setting the value moves the cursor, even if the text stays the same.
  if (isNewlyOpened || titleInput.value !== content.title) titleInput.value = content.title;
  if (isNewlyOpened || bodyInput.value !== content.body) bodyInput.value = content.body;
  pinButton.setAttribute("aria-pressed", String(content.pinned));
  const isSaving = isDirty || saveState === "saving";
  saveStatus.textContent = saveState === "failed" ? "Not saved" : isSaving ? "Saving…" : "Saved";
  saveStatus.dataset.state = saveState;
  if (openNote.savedContent === null && !isDirty) saveStatus.textContent = "";
}

function renderList(): void {
  const searchText = searchInput.value.trim();
  const isListed = (note: Note) => note === openNote || searchText === "" || note.matches(searchText);
  const notes = store.sortedNotes().filter(isListed);
  const ids = new Set(notes.map((note) => note.id));
  for (const [id, item] of items) {
    if (ids.has(id)) continue;
    item.remove();
    items.delete(id);
  }
  notes.forEach((note, index) => {
    const item = items.get(note.id) ?? createItem(note.id);
    updateItem(item, note);
    // An element loses the focus when it is moved, so items that are already in place are not moved.
    if (list.children[index] !== item) list.insertBefore(item, list.children[index] ?? null);
  });
  emptyMessage.hidden = notes.length > 0 || !store.isLoaded;
  emptyMessage.textContent = searchText ? "No notes match your search." : "No notes yet. Press N to write one.";
  list.setAttribute("aria-label", searchText ? pluralize(items.size, "note found", "notes found") : "Notes");
}

function createItem(id: string): HTMLLIElement {
  const button = el("button", { type: "button", className: "note" });
  button.append(el("strong"), el("span", { className: "preview" }), el("time"));
  button.onclick = () => {
    const note = store.get(id);
    if (note) showNote(note, bodyInput);
  };
  const item = el("li", {}, button);
  item.dataset.id = id;
  items.set(id, item);
  return item;
}

function updateItem(item: HTMLLIElement, note: Note): void {
  const button = item.firstElementChild as HTMLButtonElement;
  const [heading, preview, time] = button.children as unknown as [HTMLElement, HTMLElement, HTMLTimeElement];
  const setText = (element: HTMLElement, text: string) => {
    if (element.textContent !== text) element.textContent = text;
  };
  setText(heading, note.heading);
  const hasFailed = note.saveState === "failed";
  setText(preview, hasFailed ? "Not saved yet" : note.preview.slice(0, 140) || "No additional text");
  time.dateTime = note.updatedAt;
  setText(time, formatTimestamp(note.updatedAt));
  button.toggleAttribute("data-pinned", note.content.pinned);
  button.toggleAttribute("data-failed", hasFailed);
  if (note === openNote) button.setAttribute("aria-current", "true");
  else button.removeAttribute("aria-current");
}

/** Formats a timestamp from today as a time, and any other timestamp as a date. */
function formatTimestamp(timestamp: string): string {
  const date = new Date(timestamp);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday
    ? date.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

function createNote(): void {
  searchInput.value = "";
  showNote(store.create(), titleInput);
}

function deleteNote(note: Note): void {
  const notes = store.sortedNotes();
  const index = notes.indexOf(note);
  const nextNote = notes[index + 1] ?? notes[index - 1];
  const restore = store.remove(note);
  if (openNote === note) showNote(null);
  focusItem(nextNote?.id);
  toast.show(`Deleted “${note.heading.slice(0, 40)}”.`, { label: "Undo", run: restore });
}

/** Focuses a note in the list, or the New button if the note is not listed. */
function focusItem(id = ""): void {
  const button = items.get(id)?.firstElementChild as HTMLElement | undefined;
  (button ?? newButton).focus();
}

function closeEditor(): void {
  const id = openNote?.id;
  showNote(null);
  focusItem(id);
}

function moveFocus(offset: number): void {
  const buttons = [...list.querySelectorAll("button")];
  const last = buttons.length - 1;
  const current = buttons.indexOf(document.activeElement as HTMLButtonElement);
  const initial = offset > 0 ? 0 : last;
  const target = current < 0 ? initial : Math.min(last, Math.max(0, current + offset));
  buttons[target]?.focus();
}

titleInput.oninput = () => openNote && store.edit(openNote, { title: titleInput.value });
bodyInput.oninput = () => openNote && store.edit(openNote, { body: bodyInput.value });
pinButton.onclick = () => openNote && store.edit(openNote, { pinned: !openNote.content.pinned });
deleteButton.onclick = () => openNote && deleteNote(openNote);
newButton.onclick = createNote;
searchInput.oninput = renderList;
backButton.onclick = closeEditor;
editor.onsubmit = (event) => event.preventDefault();
titleInput.onkeydown = (event) => {
  if (event.key !== "Enter" || event.isComposing) return;
  event.preventDefault();
  bodyInput.focus();
};

addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  const isInList = list.contains(document.activeElement);
  if (event.key === "Escape" && editor.contains(document.activeElement)) closeEditor();
  else if (event.key === "Escape" && document.activeElement === searchInput) {
    searchInput.value = "";
    renderList();
  } else if (event.key === "ArrowDown" && document.activeElement === searchInput) moveFocus(1);
  else if (isTyping(event)) return;
  else if (event.key === "n") createNote();
  else if (event.key === "/") searchInput.focus();
  else if (event.key === "ArrowDown") moveFocus(1);
  else if (event.key === "ArrowUp") moveFocus(-1);
  else if (event.key === "Delete" && isInList) {
    const note = store.get((document.activeElement!.parentElement as HTMLElement).dataset.id ?? "");
    if (note) deleteNote(note);
  } else return;
  event.preventDefault();
});

liveIndicator.hidden = true;
renderEditor();
store.start();
