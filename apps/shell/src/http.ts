// Sends requests to this origin. Each has a timeout, and each error has a message for the owner.

const REQUEST_TIMEOUT_MS = 10_000;

export class SignedOutError extends Error {
  constructor() {
    super("You are signed out.");
  }
}

/** An invalid field: a JSON pointer, or `?name` for a query parameter. */
interface FieldError {
  pointer: string;
  detail: string;
}

/** The members of a problem (RFC 9457) that are used here. */
interface Problem {
  title?: string;
  detail?: string;
  code?: string;
  requestId?: string;
  errors?: FieldError[];
}

export class RequestError extends Error {
  constructor(
    message: string,
    /** The HTTP status; 0 if there was no response. */
    readonly status = 0,
    readonly fieldErrors: FieldError[] = [],
  ) {
    super(message);
  }

  /** Whether the same request may succeed later. */
  get isRetryable(): boolean {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

export interface RequestOptions {
  timeoutMs?: number;
  /** Cancels the request; `fetchJson` then throws the signal's reason. */
  signal?: AbortSignal;
  /** Sent as JSON with the method `POST`. */
  body?: unknown;
  /** Repeated requests with the same key are performed only once. */
  idempotencyKey?: string;
}

/** Sends a `GET` request, or a `POST` request if there is a body, and returns the parsed response body. */
export async function fetchJson<T>(path: string, options: RequestOptions = {}): Promise<T> {
  const { timeoutMs = REQUEST_TIMEOUT_MS, signal, body, idempotencyKey } = options;
  const deadline = AbortSignal.timeout(timeoutMs);
  const request: RequestInit = { signal: signal ? AbortSignal.any([signal, deadline]) : deadline, redirect: "error" };
  const headers = new Headers({ accept: "application/json" });
  if (idempotencyKey) headers.set("idempotency-key", idempotencyKey);
  if (body !== undefined) {
    headers.set("content-type", "application/json");
    Object.assign(request, { method: "POST", body: JSON.stringify(body) });
  }
  try {
    const response = await fetch(path, { ...request, headers });
    if (response.status === 401) throw new SignedOutError();
    if (response.ok) return (await response.json()) as T;
    throw toRequestError(response.status, await response.json().catch(() => ({})));
  } catch (error) {
    signal?.throwIfAborted();
    if (error instanceof SignedOutError || error instanceof RequestError) throw error;
    if (deadline.aborted) throw new RequestError(`There was no response within ${timeoutMs / 1000} seconds.`);
    if (error instanceof SyntaxError) throw new RequestError("The response could not be read.");
    throw new RequestError("Your computer cannot be reached.");
  }
}

function toRequestError(status: number, problem: Problem): RequestError {
  // The detail of an internal error only refers to its request id.
  const message = problem.code === "internal" ? `${problem.title} in request ${problem.requestId}.` : problem.detail;
  return new RequestError(message ?? `The request failed with status ${status}.`, status, problem.errors ?? []);
}
