// The bridge client: sends requests for this app with the page's token, and follows the change stream.
//
// The page has an opaque origin, and therefore no storage and no cookies. Its token is in its URL, and the frame (the
// parent page, see `docs/apps/tokens.md`) sends a new token before the current one expires. This module never reloads
// the page on its own, because the page may hold unsaved text.

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

/**
 * - `retryable`: the same request may succeed later.
 * - `signed-out`: the page's token has expired, and the frame has no newer one.
 * - `rejected`: the request would fail again.
 */
export type ErrorKind = "retryable" | "signed-out" | "rejected";

export class BridgeError extends Error {
  constructor(
    readonly kind: ErrorKind,
    message: string,
    /** The HTTP status; 0 if there was no response. */
    readonly status = 0,
  ) {
    super(message);
  }
}

const REQUEST_TIMEOUT_MS = 15_000;
const MAX_ATTEMPTS = 3;
/** How long to wait for a new token from the frame. */
const TOKEN_TIMEOUT_MS = 4_000;
/** The server sends a heartbeat every 15 seconds. */
const STREAM_IDLE_TIMEOUT_MS = 40_000;
const MAX_RECONNECT_DELAY_MS = 30_000;

// The path of the page is `/apps/<slug>/~<token>/…`.
const [, , appSlug = "", tokenSegment = ""] = location.pathname.split("/");
let token = tokenSegment.startsWith("~") ? tokenSegment.slice(1) : "";
const tokenListeners = new Set<() => void>();

addEventListener("message", (event) => {
  if (event.source !== parent || event.data?.type !== "svc:app-token") return;
  if (typeof event.data.token !== "string") return;
  token = event.data.token;
  for (const listener of tokenListeners) listener();
});

const sleep = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms));

/** Varies a delay by up to 25%, so that pages do not all retry at the same time. */
export const addJitter = (ms: number) => ms * (0.75 + Math.random() / 2);

/** Requests the current token from the frame. Returns whether it differs from `rejectedToken`. */
async function updateToken(rejectedToken: string): Promise<boolean> {
  if (token !== rejectedToken) return true;
  parent.postMessage({ type: "svc:app-token-wanted" }, "*");
  await new Promise<void>((resolve) => {
    const finish = () => {
      clearTimeout(timer);
      tokenListeners.delete(listener);
      resolve();
    };
    const listener = () => {
      if (token !== rejectedToken) finish();
    };
    const timer = setTimeout(finish, TOKEN_TIMEOUT_MS);
    tokenListeners.add(listener);
  });
  return token !== rejectedToken;
}

/** Makes the frame sign in again and reload the page. Unsaved text is lost, so call it only at the user's request. */
export function signInAgain(): void {
  parent.postMessage({ type: "svc:app-token-ended" }, "*");
}

async function sendOnce(body: string, keepalive: boolean): Promise<unknown> {
  const usedToken = token;
  let response: Response;
  try {
    response = await fetch("/api/bridge/query", {
      method: "POST",
      headers: { authorization: `Bearer ${usedToken}`, "content-type": "application/json" },
      body,
      keepalive,
      signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS),
    });
  } catch {
    throw new BridgeError("retryable", "Your computer cannot be reached.");
  }
  const { ok, status } = response;
  const responseBody = await response.json().catch(() => null);
  // The connection was lost before the end of the response.
  if (ok && responseBody === null) throw new BridgeError("retryable", "The response could not be read.", status);
  if (ok) return responseBody;
  if (status === 401) {
    if (await updateToken(usedToken)) throw new BridgeError("retryable", "The sign-in was renewed. Try again.", 401);
    throw new BridgeError("signed-out", "You are signed out.", 401);
  }
  const isRetryable = status >= 500 || status === 429 || responseBody?.retryable === true;
  const message = responseBody?.detail ?? `The request failed with status ${status}.`;
  throw new BridgeError(isRetryable ? "retryable" : "rejected", message, status);
}

export interface BridgeRequest {
  action: string;
  table: string;
  [field: string]: unknown;
}

/**
 * Sends a request for this app, and returns the parsed response body. After a retryable error, the request is sent
 * again, so it must be idempotent: an insert, for example, must supply the row's id.
 */
export async function callBridge<T>(request: BridgeRequest, { keepalive = false } = {}): Promise<T> {
  const body = JSON.stringify({ app: appSlug, ...request });
  for (let attempt = 1; ; attempt += 1) {
    try {
      return (await sendOnce(body, keepalive)) as T;
    } catch (error) {
      const canRetry = error instanceof BridgeError && error.kind === "retryable" && attempt < MAX_ATTEMPTS;
      if (!canRetry) throw error;
      await sleep(addJitter(300 * 2 ** attempt));
    }
  }
}

/** Generates a UUIDv7, which sorts by time. `crypto.randomUUID` would return version 4. */
export function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  const now = Date.now();
  for (let index = 0; index < 6; index += 1) bytes[index] = Math.floor(now / 2 ** (40 - 8 * index)) & 0xff;
  bytes[6] = (bytes[6]! & 0x0f) | 0x70;
  bytes[8] = (bytes[8]! & 0x3f) | 0x80;
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return [hex.slice(0, 8), hex.slice(8, 12), hex.slice(12, 16), hex.slice(16, 20), hex.slice(20)].join("-");
}

export interface ChangeListener {
  /** Called when the stream is open but earlier changes may have been missed: read the tables now. */
  onResync(): void;
  onChanges(changes: Change[]): void;
  /** Called when the stream opens, and after it is lost or fails to open. */
  onConnectionChange(isConnected: boolean): void;
}

/** Follows the app's changes until the page is closed. Reconnects with backoff, and resumes after the last event. */
export async function followChanges(listener: ChangeListener): Promise<never> {
  let lastEventId: string | undefined;
  let failures = 0;
  for (;;) {
    const usedToken = token;
    try {
      for await (const event of streamEvents(lastEventId)) {
        failures = 0;
        if (event.name === "ready") {
          if (lastEventId === undefined) listener.onResync();
          listener.onConnectionChange(true);
        } else if (event.data) {
          listener.onChanges((JSON.parse(event.data) as { changes: Change[] }).changes);
        }
        lastEventId = event.id ?? lastEventId;
      }
    } catch (error) {
      failures += 1;
      const status = error instanceof BridgeError ? error.status : 0;
      // The server no longer has the events after this id, so start over with a resync.
      if (status === 410) lastEventId = undefined;
      if (status === 401) await updateToken(usedToken);
    }
    listener.onConnectionChange(false);
    await sleep(addJitter(Math.min(MAX_RECONNECT_DELAY_MS, 500 * 2 ** failures)));
  }
}

interface ServerEvent {
  name: string;
  data: string;
  id: string | undefined;
}

/** Reads server-sent events with `fetch`, because `EventSource` cannot send an `Authorization` header. */
async function* streamEvents(lastEventId: string | undefined): AsyncGenerator<ServerEvent> {
  const controller = new AbortController();
  let idleTimer = setTimeout(() => controller.abort(), STREAM_IDLE_TIMEOUT_MS);
  try {
    const headers: Record<string, string> = { authorization: `Bearer ${token}` };
    if (lastEventId !== undefined) headers["last-event-id"] = lastEventId;
    const response = await fetch("/api/bridge/changes", { headers, signal: controller.signal, cache: "no-store" });
    if (!response.ok || !response.body) {
      throw new BridgeError("retryable", "The change stream could not be opened.", response.status);
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(idleTimer);
      idleTimer = setTimeout(() => controller.abort(), STREAM_IDLE_TIMEOUT_MS);
      const blocks = (buffer + value).split("\n\n");
      buffer = blocks.pop() ?? "";
      for (const block of blocks) yield parseEvent(block);
    }
  } finally {
    clearTimeout(idleTimer);
    controller.abort();
  }
}

function parseEvent(block: string): ServerEvent {
  const event: ServerEvent = { name: "message", data: "", id: undefined };
  for (const line of block.split("\n")) {
    const [field = "", ...rest] = line.split(": ");
    const value = rest.join(": ");
    if (field === "event") event.name = value;
    if (field === "data") event.data += value;
    if (field === "id") event.id = value;
  }
  return event;
}
