// All tasks, with what was done here shown at once. What did not reach the bridge stays, is marked, and is tried again.

import { ask, BridgeError, type Change, follow, newId, type Row } from "../../shared/bridge";
import { allRows, asBridgeError, changedIds, Patience, rowsOf } from "../../shared/rows";

export interface Content {
  title: string;
  done: boolean;
  due: string | null;
}

interface TaskRow extends Row {
  title: string | null;
  done: boolean | null;
  due: string | null;
}

export interface Task extends Content {
  readonly id: string;
  /** Fields that the bridge does not have yet. */
  pending: Partial<Content>;
  isNew: boolean;
  isRunning: boolean;
  hasFailed: boolean;
}

export interface View {
  changed(): void;
  failed(error: BridgeError): void;
  live(is: boolean): void;
}

const table = "tasks";
/** Rows asked for, or deleted, at once. */
const PAGE = 1000;
const READING = { table, newestBy: "created_at", page: PAGE, most: 10_000 } as const;

export class Store {
  private readonly tasks = new Map<string, Task>();
  private readonly patience = new Patience(() => this.retry());
  isLoaded = false;

  constructor(private readonly view: View) {
    addEventListener("online", () => this.retry());
  }

  start(): void {
    void follow({
      started: () => void this.load(),
      changed: (changes) => void this.obey(changes),
      live: (is) => {
        this.view.live(is);
        if (is) this.retry();
      },
    });
  }

  all(): Task[] {
    return [...this.tasks.values()].sort(order);
  }

  get(id: string): Task | undefined {
    return this.tasks.get(id);
  }

  add(content: Content): Task {
    const task = { id: newId(), ...content, pending: { ...content }, isNew: true, isRunning: false, hasFailed: false };
    this.tasks.set(task.id, task);
    this.view.changed();
    void this.write(task);
    return task;
  }

  edit(task: Task, part: Partial<Content>): void {
    Object.assign(task, part);
    Object.assign(task.pending, part);
    this.view.changed();
    void this.write(task);
  }

  /** The answer is what brings them back. */
  remove(tasks: Task[]): () => void {
    for (const task of tasks) this.tasks.delete(task.id);
    this.view.changed();
    void this.removeRows(tasks);
    return () => {
      for (const { title, done, due } of tasks) this.add({ title, done, due });
    };
  }

  /** Nothing failed that is not put right. */
  get isSettled(): boolean {
    return this.isLoaded && [...this.tasks.values()].every((task) => !task.hasFailed);
  }

  retry(): void {
    if (!this.isLoaded) void this.load();
    for (const task of this.tasks.values()) {
      if (task.hasFailed) void this.write(task);
    }
  }

  async load(): Promise<void> {
    try {
      const rows = await allRows<TaskRow>(READING);
      const there = new Set(rows.map((row) => row.id));
      for (const task of this.tasks.values()) {
        if (!there.has(task.id) && !isWaiting(task)) this.tasks.delete(task.id);
      }
      for (const row of rows) this.take(row);
      this.isLoaded = true;
      this.view.changed();
    } catch (error) {
      this.fell(error);
    }
  }

  private async obey(changes: Change[]): Promise<void> {
    const ids = changedIds(table, changes);
    if (ids === null) return this.load();
    if (ids.length === 0) return;
    try {
      const rows = await rowsOf<TaskRow>(table, ids);
      for (const id of ids) {
        const row = rows.get(id);
        const task = this.tasks.get(id);
        if (row) this.take(row);
        else if (task && !isWaiting(task)) this.tasks.delete(id);
      }
      this.view.changed();
    } catch (error) {
      // What is shown may be old: all of it is read again.
      this.isLoaded = false;
      this.fell(error);
    }
  }

  /** What was done here and is not there yet stays over what comes. */
  private take(row: TaskRow): void {
    const content = { title: row.title ?? "", done: row.done ?? false, due: row.due };
    const task = this.tasks.get(row.id);
    if (task) Object.assign(task, content, task.pending, { isNew: false });
    else this.tasks.set(row.id, { id: row.id, ...content, pending: {}, isNew: false, isRunning: false, hasFailed: false });
  }

  private async write(task: Task): Promise<void> {
    if (task.isRunning || !isWaiting(task)) return;
    const sent = { ...task.pending };
    task.isRunning = true;
    task.hasFailed = false;
    try {
      if (task.isNew) await put(task);
      else await update(task, sent);
      task.isNew = false;
      this.patience.worked();
      for (const key of Object.keys(sent) as (keyof Content)[]) {
        if (task.pending[key] === sent[key]) delete task.pending[key];
      }
    } catch (error) {
      task.hasFailed = true;
      this.fell(error);
    } finally {
      task.isRunning = false;
      this.view.changed();
    }
    // Taken away, or changed again, while it was written.
    if (!this.tasks.has(task.id)) await this.removeRows([task]);
    else if (isWaiting(task) && !task.hasFailed) await this.write(task);
  }

  /** Tried again by itself, ever more seldom, unless the person does it before. */
  private fell(error: unknown): void {
    const why = asBridgeError(error);
    this.view.failed(why);
    this.patience.failed(why);
  }

  private async removeRows(tasks: Task[]): Promise<void> {
    const ids = tasks.map((task) => task.id);
    try {
      for (let at = 0; at < ids.length; at += PAGE) {
        await ask({ action: "delete", table, filter: { id: { in: ids.slice(at, at + PAGE) } } });
      }
    } catch (error) {
      for (const task of tasks) this.tasks.set(task.id, task);
      this.view.changed();
      this.fell(error);
    }
  }
}

function isWaiting(task: Task): boolean {
  return Object.keys(task.pending).length > 0;
}

/** Open ones first, of these the one that is due first; what has no date comes in the order of its making. */
function order(one: Task, other: Task): number {
  const late = (task: Task) => task.due ?? "9999-12-31";
  return Number(one.done) - Number(other.done) || late(one).localeCompare(late(other)) || one.id.localeCompare(other.id);
}

async function put({ id, title, done, due }: Task): Promise<void> {
  await ask({ action: "upsert", table, data: { id, title, done, due }, onConflict: ["id"] });
}

async function update(task: Task, part: Partial<Content>): Promise<void> {
  try {
    await ask({ action: "update", table, id: task.id, data: part });
  } catch (error) {
    // Deleted elsewhere while it was changed here: what was written here comes back.
    if (!(error instanceof BridgeError) || error.status !== 404) throw error;
    await put(task);
  }
}
