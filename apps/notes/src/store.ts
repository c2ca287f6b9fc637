// Holds the notes, and saves each one shortly after it is edited. No text is lost while the page is open: after a
// failed save, the text stays on the page. The save is retried with backoff if the error is retryable, and in any case
// when the page reconnects or the user tries again. If a note was also changed elsewhere, both versions are kept as
// separate notes.

import { type BridgeError, callBridge, type Change, followChanges, newId } from "../../shared/bridge";
import { Backoff, collectChangedIds, ReadOrder, readRows, readRowsById, toBridgeError } from "../../shared/rows";
import { compareNotes, isEmpty, isSameContent, Note, type NoteContent, type NoteRow, toContent } from "./note";

const SAVE_DELAY_MS = 500;

export interface StoreListener {
  /** Called after a change to `note`; `null` if several notes may have changed, or one was added or removed. */
  onChange(note: Note | null): void;
  /** Called after notes could not be read, or a note could not be saved. */
  onError(error: BridgeError): void;
  /** Called after a note could not be deleted, and was added again. */
  onDeleteError(note: Note, error: BridgeError): void;
  /** Called when a note was edited both here and elsewhere; `copy` has this page's version. */
  onConflict(original: Note, copy: Note): void;
  onConnectionChange(isConnected: boolean): void;
}

const table = "notes";
const QUERY = { table, sortBy: "updated_at", pageSize: 500, maxRows: 5_000 } as const;

export class Store {
  private readonly notes = new Map<string, Note>();
  private readonly readOrder = new ReadOrder();
  private readonly backoff = new Backoff(() => this.retry());
  private loadsInProgress = 0;
  isLoaded = false;

  constructor(private readonly listener: StoreListener) {
    // Requests with keepalive are sent even if the page is closing. Browsers limit their bodies to 64 KiB.
    addEventListener("visibilitychange", () => document.hidden && this.saveAll({ keepalive: true }));
    addEventListener("pagehide", () => this.saveAll({ keepalive: true }));
    addEventListener("online", () => this.retry());
  }

  start(): void {
    void followChanges({
      onResync: () => void this.load(),
      onChanges: (changes) => void this.applyChanges(changes),
      onConnectionChange: (isConnected) => {
        this.listener.onConnectionChange(isConnected);
        if (isConnected) this.retry();
      },
    });
  }

  /** Whether the notes are loaded and no note has failed to save. */
  get isHealthy(): boolean {
    return this.isLoaded && [...this.notes.values()].every((note) => note.saveState !== "failed");
  }

  get(id: string): Note | undefined {
    return this.notes.get(id);
  }

  sortedNotes(): Note[] {
    return [...this.notes.values()].sort(compareNotes);
  }

  /** Adds a note. A note without content is saved only once it is edited. */
  create(content?: NoteContent): Note {
    const note = Note.createEmpty(newId());
    if (content) note.content = { ...content };
    this.notes.set(note.id, note);
    if (content) this.scheduleSave(note, 0);
    this.listener.onChange(null);
    return note;
  }

  edit(note: Note, changes: Partial<NoteContent>): void {
    Object.assign(note.content, changes);
    this.scheduleSave(note, changes.pinned === undefined ? SAVE_DELAY_MS : 0);
    this.listener.onChange(note);
  }

  /**
   * Deletes a note; if that fails, the note is shown again. The returned function undoes the deletion: it adds the
   * content as a new note.
   */
  remove(note: Note): () => void {
    clearTimeout(note.saveTimer);
    this.notes.delete(note.id);
    this.readOrder.recordWrite(note.id);
    this.listener.onChange(null);
    if (note.savedContent !== null || note.saveState === "saving") void this.deleteRow(note);
    return () => this.create(note.content);
  }

  /** Removes a note that has no row and no content. */
  discardIfEmpty(note: Note): void {
    if (note.savedContent === null && isEmpty(note.content) && note.saveState !== "saving") {
      this.notes.delete(note.id);
      this.listener.onChange(null);
    }
  }

  retry(): void {
    if (!this.isLoaded && this.loadsInProgress === 0) void this.load();
    this.saveAll();
  }

  private async load(): Promise<void> {
    const read = this.readOrder.beginRead();
    this.loadsInProgress += 1;
    try {
      const rows = await readRows<NoteRow>(QUERY);
      const ids = new Set(rows.map((row) => row.id));
      for (const id of this.notes.keys()) {
        if (!ids.has(id)) this.applyRow(id, undefined, read);
      }
      for (const row of rows) this.applyRow(row.id, row, read);
      this.isLoaded = true;
      this.listener.onChange(null);
    } catch (error) {
      this.handleReadError(error);
    } finally {
      this.loadsInProgress -= 1;
    }
  }

  private async applyChanges(changes: Change[]): Promise<void> {
    const ids = collectChangedIds(table, changes);
    if (ids === null) return this.load();
    if (ids.length > 0) await this.reloadRows(ids);
  }

  private async reloadRows(ids: string[]): Promise<void> {
    const read = this.readOrder.beginRead();
    try {
      const rows = await readRowsById<NoteRow>(table, ids);
      const outdatedIds = ids.filter((id) => !this.applyRow(id, rows.get(id), read));
      this.listener.onChange(null);
      // The rows may have been changed elsewhere after this page wrote them.
      if (outdatedIds.length > 0) await this.reloadRows(outdatedIds);
    } catch (error) {
      this.handleReadError(error);
    }
  }

  /** Applies a row, or its absence if it is `undefined`. Returns `false` if the read is outdated for this row. */
  private applyRow(id: string, row: NoteRow | undefined, read: number): boolean {
    if (!this.readOrder.accept(id, read)) return false;
    const note = this.notes.get(id);
    if (!row) {
      if (note && note.savedContent !== null) this.handleDeletedRow(note);
    } else if (!note) {
      this.notes.set(id, Note.fromRow(row));
    } else if (note.saveState !== "saving" && !note.isDirty) {
      // A row must not replace unsaved edits. The note's next save detects whether it conflicts with them.
      note.applyRow(row);
      this.listener.onChange(note);
    }
    return true;
  }

  /** Handles a note that was deleted elsewhere. If it has unsaved edits, it is inserted again with the same id. */
  private handleDeletedRow(note: Note): void {
    if (note.isDirty) {
      note.savedContent = null;
      this.scheduleSave(note, 0);
    } else if (note.saveState !== "saving") {
      this.notes.delete(note.id);
    }
  }

  private saveAll({ keepalive = false } = {}): void {
    for (const note of this.notes.values()) {
      if (note.isDirty) this.scheduleSave(note, 0, keepalive);
    }
  }

  private scheduleSave(note: Note, delayMs: number, keepalive = false): void {
    clearTimeout(note.saveTimer);
    // A save in progress schedules another one if the note is still dirty afterwards.
    if (note.saveState === "saving") return;
    note.saveState = "scheduled";
    if (delayMs === 0) void this.save(note, keepalive);
    else note.saveTimer = window.setTimeout(() => void this.save(note, keepalive), delayMs);
  }

  private async save(note: Note, keepalive: boolean): Promise<void> {
    if (!note.isDirty) {
      note.saveState = "idle";
      return this.listener.onChange(note);
    }
    const content = { ...note.content };
    note.saveState = "saving";
    this.listener.onChange(note);
    try {
      const isNew = note.savedContent === null;
      const row = await (isNew ? insertRow(note.id, content, keepalive) : updateRow(note, content, keepalive));
      note.saveState = "idle";
      if (row === null) {
        this.resolveConflict(note);
      } else {
        this.backoff.reset();
        this.readOrder.recordWrite(note.id);
        note.savedContent = toContent(row);
        note.updatedAt = row.updated_at;
        // The note may have been deleted or edited again in the meantime.
        if (!this.notes.has(note.id)) await this.deleteRow(note);
        else if (note.isDirty) this.scheduleSave(note, SAVE_DELAY_MS);
      }
      this.listener.onChange(note);
    } catch (error) {
      note.saveState = "failed";
      this.listener.onChange(note);
      this.handleError(error);
    }
  }

  /** The notes may be stale now, so the retry reloads all of them. */
  private handleReadError(error: unknown): void {
    this.isLoaded = false;
    this.handleError(error);
  }

  private handleError(error: unknown): void {
    const bridgeError = toBridgeError(error);
    this.listener.onError(bridgeError);
    this.backoff.scheduleRetry(bridgeError);
  }

  /** Keeps both versions: the one that was saved elsewhere under the note's id, and this page's as a new note. */
  private resolveConflict(note: Note): void {
    const localContent = { ...note.content, title: `${note.heading} (your version)` };
    note.content = { ...(note.savedContent ?? note.content) };
    void this.reloadRows([note.id]);
    this.listener.onConflict(note, this.create(localContent));
  }

  private async deleteRow(note: Note): Promise<void> {
    try {
      await callBridge({ action: "delete", table, filter: { id: note.id }, maxAffected: 1 });
      this.readOrder.recordWrite(note.id);
    } catch (error) {
      const bridgeError = toBridgeError(error);
      this.notes.set(note.id, note);
      this.listener.onChange(null);
      this.listener.onDeleteError(note, bridgeError);
      // Only the user can repeat the deletion, but the restored note may have unsaved edits, which this retry saves.
      this.backoff.scheduleRetry(bridgeError);
    }
  }
}

/** Inserts a row. The upsert makes a retry safe if the response to the first attempt was lost. */
async function insertRow(id: string, content: NoteContent, keepalive: boolean): Promise<NoteRow> {
  const data = { id, ...content };
  const request = { action: "upsert", table, data, onConflict: ["id"] };
  return (await callBridge<{ data: NoteRow }>(request, { keepalive })).data;
}

/**
 * Updates a row if its content is still what this page last saved or read. Inserts it again if it was deleted
 * elsewhere. Returns `null` if its content was changed elsewhere, or if its timestamp changed during every attempt.
 */
async function updateRow(
  note: Note,
  content: NoteContent,
  keepalive: boolean,
  attemptsLeft = 3,
): Promise<NoteRow | null> {
  const filter = { id: note.id, updated_at: note.updatedAt };
  const request = { action: "update", table, filter, data: content, maxAffected: 1, returning: true };
  const { rows } = (await callBridge<{ data: { rows?: NoteRow[] } }>(request, { keepalive })).data;
  if (rows?.[0]) return rows[0];
  const found = await callBridge<{ data: NoteRow[] }>({ action: "find", table, filter: { id: note.id }, limit: 1 });
  const current = found.data[0];
  if (!current) return insertRow(note.id, content, keepalive);
  const hasNewContent = isSameContent(toContent(current), content);
  const hasOldContent = note.savedContent !== null && isSameContent(toContent(current), note.savedContent);
  if (hasNewContent) return current;
  if (!hasOldContent || attemptsLeft === 1) return null;
  // Only the timestamp has changed, so the update cannot overwrite anything.
  note.updatedAt = current.updated_at;
  return updateRow(note, content, keepalive, attemptsLeft - 1);
}
