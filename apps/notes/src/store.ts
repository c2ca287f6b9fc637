// All notes, saved a moment after they were written. No text is lost: what cannot be saved stays on the page and is
// tried again; what changed here and elsewhere is kept as two notes.

import { ask, type BridgeError, type Change, follow, newId } from "../../shared/bridge";
import { allRows, asBridgeError, changedIds, Patience, rowsOf } from "../../shared/rows";
import { type Content, contentOf, isEmpty, Note, type NoteRow, order, same } from "./note";

const SAVE_AFTER_MS = 500;

export interface View {
  /** Something of these notes is another now; `null`: of any. */
  changed(note: Note | null): void;
  failed(note: Note | null, error: BridgeError): void;
  /** Written here and elsewhere: `copy` has what was written here. */
  split(original: Note, copy: Note): void;
  live(is: boolean): void;
}

const table = "notes";
const READING = { table, newestBy: "updated_at", page: 500, most: 5_000 } as const;

export class Store {
  private readonly notes = new Map<string, Note>();
  private readonly patience = new Patience(() => this.retry());
  isLoaded = false;

  constructor(private readonly view: View) {
    // What is not saved when the page goes away is sent along with its end.
    addEventListener("visibilitychange", () => document.hidden && this.flush(true));
    addEventListener("pagehide", () => this.flush(true));
    addEventListener("online", () => this.flush(false));
  }

  start(): void {
    void follow({
      started: () => void this.load(),
      changed: (changes) => void this.obey(changes),
      live: (is) => {
        this.view.live(is);
        if (is) this.flush(false);
      },
    });
  }

  /** Nothing failed that is not put right. */
  get isSettled(): boolean {
    return this.isLoaded && [...this.notes.values()].every((note) => note.saving !== "failed");
  }

  get(id: string): Note | undefined {
    return this.notes.get(id);
  }

  all(): Note[] {
    return [...this.notes.values()].sort(order);
  }

  create(content?: Content): Note {
    const note = Note.fresh(newId());
    if (content) note.content = { ...content };
    this.notes.set(note.id, note);
    if (content) this.save(note, 0);
    this.view.changed(null);
    return note;
  }

  edit(note: Note, part: Partial<Content>): void {
    Object.assign(note.content, part);
    this.save(note, part.pinned === undefined ? SAVE_AFTER_MS : 0);
    this.view.changed(note);
  }

  /** Takes it away at once; the answer is what puts it back. */
  remove(note: Note): () => void {
    clearTimeout(note.timer);
    this.notes.delete(note.id);
    this.view.changed(null);
    if (note.saved !== null || note.saving === "running") void this.removeRow(note);
    return () => this.create(note.content);
  }

  /** A note in which nothing was ever written is none. */
  dropIfEmpty(note: Note): void {
    if (note.saved === null && isEmpty(note.content) && note.saving !== "running") {
      this.notes.delete(note.id);
      this.view.changed(null);
    }
  }

  retry(): void {
    if (!this.isLoaded) void this.load();
    this.flush(false);
  }

  async load(): Promise<void> {
    try {
      const rows = await allRows<NoteRow>(READING);
      const there = new Set(rows.map((row) => row.id));
      for (const note of this.notes.values()) {
        if (!there.has(note.id) && note.saved !== null) this.lost(note);
      }
      for (const row of rows) this.take(row);
      this.isLoaded = true;
      this.view.changed(null);
    } catch (error) {
      this.fell(null, error);
    }
  }

  private async obey(changes: Change[]): Promise<void> {
    const ids = changedIds(table, changes);
    if (ids === null) return this.load();
    if (ids.length === 0) return;
    try {
      const rows = await rowsOf<NoteRow>(table, ids);
      for (const id of ids) {
        const row = rows.get(id);
        const note = this.notes.get(id);
        if (row) this.take(row);
        else if (note && note.saved !== null) this.lost(note);
      }
      this.view.changed(null);
    } catch (error) {
      // What is shown may be old: all of it is read again.
      this.isLoaded = false;
      this.fell(null, error);
    }
  }

  private take(row: NoteRow): void {
    const note = this.notes.get(row.id);
    if (!note) {
      this.notes.set(row.id, Note.of(row));
      return;
    }
    // While this page writes it, its own answer says what is there; a written-in note is compared when it is saved.
    if (note.saving === "running" || note.isDirty) return;
    note.take(row);
    this.view.changed(note);
  }

  /** Deleted elsewhere. What was written here since is saved as a new row of the same id. */
  private lost(note: Note): void {
    if (note.isDirty) {
      note.saved = null;
      this.save(note, 0);
    } else if (note.saving !== "running") {
      this.notes.delete(note.id);
    }
  }

  private flush(last: boolean): void {
    for (const note of this.notes.values()) {
      if (note.isDirty) this.save(note, 0, last);
    }
  }

  private save(note: Note, after: number, last = false): void {
    clearTimeout(note.timer);
    if (note.saving === "running") return;
    note.saving = "waiting";
    if (after === 0) void this.write(note, last);
    else note.timer = window.setTimeout(() => void this.write(note, last), after);
  }

  private async write(note: Note, last: boolean): Promise<void> {
    if (!note.isDirty) {
      note.saving = "idle";
      return this.view.changed(note);
    }
    const sent = { ...note.content };
    note.saving = "running";
    this.view.changed(note);
    try {
      const row = await (note.saved === null ? insert(note.id, sent, last) : update(note, sent, last));
      note.saving = "idle";
      if (row === null) {
        this.divide(note);
      } else {
        this.patience.worked();
        note.saved = contentOf(row);
        note.updatedAt = row.updated_at;
        if (!this.notes.has(note.id)) await this.removeRow(note);
        else if (note.isDirty) this.save(note, SAVE_AFTER_MS);
      }
      this.view.changed(note);
    } catch (error) {
      note.saving = "failed";
      this.view.changed(note);
      this.fell(note, error);
    }
  }

  /** Tried again by itself, ever more seldom, unless the person does it before. */
  private fell(note: Note | null, error: unknown): void {
    const why = asBridgeError(error);
    this.view.failed(note, why);
    this.patience.failed(why);
  }

  /** Somebody else wrote into this note, too: theirs stays under its id, ours becomes a note of its own. */
  private divide(note: Note): void {
    const ours = { ...note.content, title: `${note.heading} (your version)` };
    note.content = { ...(note.saved ?? note.content) };
    void this.load();
    this.view.split(note, this.create(ours));
  }

  private async removeRow(note: Note): Promise<void> {
    try {
      await ask({ action: "delete", table, filter: { id: note.id }, maxAffected: 1 });
    } catch (error) {
      this.notes.set(note.id, note);
      this.view.changed(null);
      this.fell(note, error);
    }
  }
}

/** Again after an answer that never came, it finds its own row. */
async function insert(id: string, content: Content, keepalive: boolean): Promise<NoteRow> {
  const data = { id, ...content };
  const question = { action: "upsert", table, data, onConflict: ["id"] };
  return (await ask<{ data: NoteRow }>(question, { keepalive })).data;
}

/** Only over the version that this page knows; `null` where there is another one. */
async function update(note: Note, content: Content, keepalive: boolean, tries = 3): Promise<NoteRow | null> {
  const filter = { id: note.id, updated_at: note.updatedAt };
  const question = { action: "update", table, filter, data: content, maxAffected: 1, returning: true };
  const { rows } = (await ask<{ data: { rows?: NoteRow[] } }>(question, { keepalive })).data;
  if (rows?.[0]) return rows[0];
  const found = await ask<{ data: NoteRow[] }>({ action: "find", table, filter: { id: note.id }, limit: 1 });
  const there = found.data[0];
  if (!there) return insert(note.id, content, keepalive);
  const isOurs = same(contentOf(there), content);
  const isAsBefore = note.saved !== null && same(contentOf(there), note.saved);
  if (isOurs) return there;
  if (!isAsBefore || tries === 1) return null;
  note.updatedAt = there.updated_at;
  return update(note, content, keepalive, tries - 1);
}
