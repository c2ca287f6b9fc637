// An app's way to its rows: the token of its page, questions to the bridge, and the stream of changes.
//
// The page has an opaque origin: no storage, no cookies. Its token is in its address, and the frame around it sends a
// fresh one before that ends. Nothing here ever reloads the page, because the page may hold text that is not saved.

export interface Row {
  id: string;
  created_at: string;
  updated_at: string;
}

export interface Change {
  app: string;
  table: string;
  action: "insert" | "update" | "delete" | "truncate";
  ids: string[] | null;
}

/** `later`: the same question may well be answered a little later. `session`: the page's token has ended. */
export type Cause = "later" | "session" | "refused";

export class BridgeError extends Error {
  constructor(
    readonly why: Cause,
    message: string,
    readonly status = 0,
  ) {
    super(message);
  }
}

const DEADLINE_MS = 15_000;
const ATTEMPTS = 3;
const TOKEN_PATIENCE_MS = 4_000;
/** The stream has a heartbeat each 15 seconds. */
const SILENCE_MS = 40_000;
const LONGEST_PAUSE_MS = 30_000;

const [, , slug = "", held = ""] = location.pathname.split("/");
export const app = slug;
let token = held.startsWith("~") ? held.slice(1) : "";
const waiting = new Set<() => void>();

addEventListener("message", (event) => {
  if (event.source !== parent || event.data?.type !== "svc:app-token") return;
  if (typeof event.data.token !== "string") return;
  token = event.data.token;
  for (const told of waiting) told();
});

const sleep = (ms: number) => new Promise<void>((done) => setTimeout(done, ms));
const jitter = (ms: number) => ms * (0.75 + Math.random() / 2);

/** Asks the frame for a token other than the one that was refused. */
async function renewed(refused: string): Promise<boolean> {
  if (token !== refused) return true;
  parent.postMessage({ type: "svc:app-token-wanted" }, "*");
  await Promise.race([
    sleep(TOKEN_PATIENCE_MS),
    new Promise<void>((done) => {
      const told = () => {
        if (token === refused) return;
        waiting.delete(told);
        done();
      };
      waiting.add(told);
    }),
  ]);
  return token !== refused;
}

/** For a person who was told that the session ended: the frame signs in again, and opens the page anew. */
export function signInAgain(): void {
  parent.postMessage({ type: "svc:app-token-ended" }, "*");
}

async function send(body: string, keepalive: boolean): Promise<unknown> {
  const used = token;
  let answer: Response;
  try {
    answer = await fetch("/api/bridge/query", {
      method: "POST",
      headers: { authorization: `Bearer ${used}`, "content-type": "application/json" },
      body,
      keepalive,
      signal: AbortSignal.timeout(DEADLINE_MS),
    });
  } catch {
    throw new BridgeError("later", "Your computer cannot be reached.");
  }
  const said = await answer.json().catch(() => ({}));
  if (answer.ok) return said;
  if (answer.status === 401) {
    if (await renewed(used)) throw new BridgeError("later", "A new token came.", 401);
    throw new BridgeError("session", "You are signed out.", 401);
  }
  const passes = answer.status >= 500 || answer.status === 429 || said.retryable === true;
  throw new BridgeError(passes ? "later" : "refused", said.detail ?? `The bridge said ${answer.status}.`, answer.status);
}

export interface Question {
  action: string;
  table: string;
  [field: string]: unknown;
}

/**
 * The answer's whole body. What fails for a moment is asked again, so every question has to be one that does no harm
 * twice: a new row names its own id.
 */
export async function ask<T>(question: Question, { keepalive = false } = {}): Promise<T> {
  const body = JSON.stringify({ app, ...question });
  for (let attempt = 1; ; attempt += 1) {
    try {
      return (await send(body, keepalive)) as T;
    } catch (error) {
      const again = error instanceof BridgeError && error.why === "later" && attempt < ATTEMPTS;
      if (!again) throw error;
      await sleep(jitter(300 * 2 ** attempt));
    }
  }
}

/** A UUID of version 7, in time order. Its bits come from where opaque origins may take them, too. */
export function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  const now = Date.now();
  for (let at = 0; at < 6; at += 1) bytes[at] = Math.floor(now / 2 ** (40 - 8 * at)) & 0xff;
  bytes[6] = (bytes[6]! & 0x0f) | 0x70;
  bytes[8] = (bytes[8]! & 0x3f) | 0x80;
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return [hex.slice(0, 8), hex.slice(8, 12), hex.slice(12, 16), hex.slice(16, 20), hex.slice(20)].join("-");
}

export interface Listener {
  /** The stream stands: read the tables now, and everything after that is told. Also when some was missed. */
  started(): void;
  changed(changes: Change[]): void;
  /** Whether changes are told at the moment. */
  live(is: boolean): void;
}

/** Follows the app's changes for as long as the page is open. */
export async function follow(listener: Listener): Promise<never> {
  let last: string | undefined;
  let failures = 0;
  for (;;) {
    const used = token;
    try {
      for await (const event of stream(last)) {
        failures = 0;
        if (event.name === "ready") {
          listener.live(true);
          if (last === undefined) listener.started();
        } else if (event.data) {
          listener.changed((JSON.parse(event.data) as { changes: Change[] }).changes);
        }
        last = event.id ?? last;
      }
    } catch (error) {
      failures += 1;
      const status = error instanceof BridgeError ? error.status : 0;
      // Not everything since then is known any more.
      if (status === 410) last = undefined;
      if (status === 401) await renewed(used);
    }
    listener.live(false);
    await sleep(jitter(Math.min(LONGEST_PAUSE_MS, 500 * 2 ** failures)));
  }
}

interface ServerEvent {
  name: string;
  data: string;
  id: string | undefined;
}

/** Server-sent events by fetch: an `EventSource` cannot show a token. */
async function* stream(last: string | undefined): AsyncGenerator<ServerEvent> {
  const quiet = new AbortController();
  let timer = setTimeout(() => quiet.abort(), SILENCE_MS);
  try {
    const headers: Record<string, string> = { authorization: `Bearer ${token}` };
    if (last !== undefined) headers["last-event-id"] = last;
    const answer = await fetch("/api/bridge/changes", { headers, signal: quiet.signal, cache: "no-store" });
    if (!answer.ok || !answer.body) throw new BridgeError("later", "No changes.", answer.status);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => quiet.abort(), SILENCE_MS);
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop() ?? "";
      for (const block of blocks) yield parsed(block);
    }
  } finally {
    clearTimeout(timer);
    quiet.abort();
  }
}

function parsed(block: string): ServerEvent {
  const event: ServerEvent = { name: "message", data: "", id: undefined };
  for (const line of block.split("\n")) {
    const [field = "", ...words] = line.split(": ");
    const value = words.join(": ");
    if (field === "event") event.name = value;
    if (field === "data") event.data += value;
    if (field === "id") event.id = value;
  }
  return event;
}
