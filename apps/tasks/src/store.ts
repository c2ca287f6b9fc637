// Holds the tasks. Changes are shown immediately (optimistic updates). A task whose changes could not be saved is
// marked. The save is retried with backoff if the error is retryable, and in any case when the page reconnects or the
// user tries again. A task that could not be deleted is shown again.

import { BridgeError, callBridge, type Change, followChanges, newId, type Row } from "../../shared/bridge";
import { Backoff, collectChangedIds, ReadOrder, readRows, readRowsById, toBridgeError } from "../../shared/rows";

export interface TaskContent {
  title: string;
  done: boolean;
  due: string | null;
}

interface TaskRow extends Row {
  title: string | null;
  done: boolean | null;
  due: string | null;
}

export interface Task extends TaskContent {
  readonly id: string;
  /** The fields that have not been saved yet. */
  pending: Partial<TaskContent>;
  /** Whether the task has no row yet. */
  isNew: boolean;
  isSaving: boolean;
  hasFailed: boolean;
}

export interface StoreListener {
  onChange(): void;
  /** Called after tasks could not be read, or a task could not be saved. */
  onError(error: BridgeError): void;
  /** Called after tasks could not be deleted, and were added again. */
  onDeleteError(tasks: Task[], error: BridgeError): void;
  onConnectionChange(isConnected: boolean): void;
}

const table = "tasks";
/** The maximum number of rows to read or delete in one request. */
const BATCH_SIZE = 1000;
const QUERY = { table, sortBy: "created_at", pageSize: BATCH_SIZE, maxRows: 10_000 } as const;

export class Store {
  private readonly tasks = new Map<string, Task>();
  private readonly readOrder = new ReadOrder();
  private readonly backoff = new Backoff(() => this.retry());
  private loadsInProgress = 0;
  isLoaded = false;

  constructor(private readonly listener: StoreListener) {
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

  sortedTasks(): Task[] {
    return [...this.tasks.values()].sort(compareTasks);
  }

  get(id: string): Task | undefined {
    return this.tasks.get(id);
  }

  add(content: TaskContent): void {
    const task = { id: newId(), ...content, pending: { ...content }, isNew: true, isSaving: false, hasFailed: false };
    this.tasks.set(task.id, task);
    this.listener.onChange();
    void this.save(task);
  }

  edit(task: Task, changes: Partial<TaskContent>): void {
    Object.assign(task, changes);
    Object.assign(task.pending, changes);
    this.listener.onChange();
    void this.save(task);
  }

  /** Deletes tasks. The returned function undoes the deletion: it adds the contents as new tasks. */
  remove(tasks: Task[]): () => void {
    for (const { id } of tasks) {
      this.tasks.delete(id);
      this.readOrder.recordWrite(id);
    }
    this.listener.onChange();
    void this.deleteRows(tasks);
    return () => {
      for (const { title, done, due } of tasks) this.add({ title, done, due });
    };
  }

  /** Whether the tasks are loaded and no task has failed to save. */
  get isHealthy(): boolean {
    return this.isLoaded && [...this.tasks.values()].every((task) => !task.hasFailed);
  }

  retry(): void {
    if (!this.isLoaded && this.loadsInProgress === 0) void this.load();
    for (const task of this.tasks.values()) {
      if (task.hasFailed) void this.save(task);
    }
  }

  private async load(): Promise<void> {
    const read = this.readOrder.beginRead();
    this.loadsInProgress += 1;
    try {
      const rows = await readRows<TaskRow>(QUERY);
      const ids = new Set(rows.map((row) => row.id));
      for (const id of this.tasks.keys()) {
        if (!ids.has(id)) this.applyRow(id, undefined, read);
      }
      for (const row of rows) this.applyRow(row.id, row, read);
      this.isLoaded = true;
      this.listener.onChange();
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
      const rows = await readRowsById<TaskRow>(table, ids);
      const outdatedIds = ids.filter((id) => !this.applyRow(id, rows.get(id), read));
      this.listener.onChange();
      // The rows may have been changed elsewhere after this page wrote them.
      if (outdatedIds.length > 0) await this.reloadRows(outdatedIds);
    } catch (error) {
      this.handleReadError(error);
    }
  }

  /**
   * Adds a task from its row, or updates it; fields with unsaved changes are kept. If the row is `undefined`, deletes
   * the task unless it has unsaved changes. Returns `false` if the read is outdated for this row.
   */
  private applyRow(id: string, row: TaskRow | undefined, read: number): boolean {
    if (!this.readOrder.accept(id, read)) return false;
    const task = this.tasks.get(id);
    if (!row) {
      if (task && !isDirty(task)) this.tasks.delete(id);
      return true;
    }
    const content = { title: row.title ?? "", done: row.done ?? false, due: row.due };
    if (task) {
      Object.assign(task, content, task.pending, { isNew: false });
    } else {
      const state = { pending: {}, isNew: false, isSaving: false, hasFailed: false };
      this.tasks.set(id, { id, ...content, ...state });
    }
    return true;
  }

  private async save(task: Task): Promise<void> {
    if (task.isSaving || !isDirty(task)) return;
    const sentChanges = { ...task.pending };
    task.isSaving = true;
    task.hasFailed = false;
    try {
      if (task.isNew) await upsertRow(task);
      else await updateRow(task, sentChanges);
      task.isNew = false;
      this.backoff.reset();
      this.readOrder.recordWrite(task.id);
      for (const key of Object.keys(sentChanges) as (keyof TaskContent)[]) {
        if (task.pending[key] === sentChanges[key]) delete task.pending[key];
      }
    } catch (error) {
      task.hasFailed = true;
      this.handleError(error);
    } finally {
      task.isSaving = false;
      this.listener.onChange();
    }
    // The task may have been deleted or edited again in the meantime.
    if (!this.tasks.has(task.id)) await this.deleteRows([task]);
    else if (isDirty(task) && !task.hasFailed) await this.save(task);
  }

  /** The tasks may be stale now, so the retry reloads all of them. */
  private handleReadError(error: unknown): void {
    this.isLoaded = false;
    this.handleError(error);
  }

  private handleError(error: unknown): void {
    const bridgeError = toBridgeError(error);
    this.listener.onError(bridgeError);
    this.backoff.scheduleRetry(bridgeError);
  }

  private async deleteRows(tasks: Task[]): Promise<void> {
    for (let start = 0; start < tasks.length; start += BATCH_SIZE) {
      const ids = tasks.slice(start, start + BATCH_SIZE).map((task) => task.id);
      try {
        await callBridge({ action: "delete", table, filter: { id: { in: ids } } });
      } catch (error) {
        const remainingTasks = tasks.slice(start);
        for (const task of remainingTasks) this.tasks.set(task.id, task);
        this.listener.onChange();
        return this.listener.onDeleteError(remainingTasks, toBridgeError(error));
      }
      for (const id of ids) this.readOrder.recordWrite(id);
    }
  }
}

function isDirty(task: Task): boolean {
  return Object.keys(task.pending).length > 0;
}

/** Sorts open tasks first, then by due date; tasks without one come last. Ids sort by creation time. */
function compareTasks(a: Task, b: Task): number {
  const dueOrLast = (task: Task) => task.due ?? "9999-12-31";
  return Number(a.done) - Number(b.done) || dueOrLast(a).localeCompare(dueOrLast(b)) || a.id.localeCompare(b.id);
}

async function upsertRow({ id, title, done, due }: Task): Promise<void> {
  await callBridge({ action: "upsert", table, data: { id, title, done, due }, onConflict: ["id"] });
}

async function updateRow(task: Task, changes: Partial<TaskContent>): Promise<void> {
  try {
    await callBridge({ action: "update", table, id: task.id, data: changes });
  } catch (error) {
    // The task was deleted elsewhere while it was edited here. Inserting it again keeps the edit.
    if (!(error instanceof BridgeError) || error.status !== 404) throw error;
    await upsertRow(task);
  }
}
