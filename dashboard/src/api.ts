// Requests to the API of this service, and the session of the reader.

import { decode } from "./exact";
import type { Session } from "./types";

export const BASE = new URL("api/v1", document.baseURI.split("#")[0]).pathname;

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly field: string | null = null,
  ) {
    super(message);
  }
}

const listeners = new Set<() => void>();

/** Called when the service no longer accepts the reader. */
export function onSignedOut(call: () => void): () => void {
  listeners.add(call);
  return () => listeners.delete(call);
}

// A stream that another tab opened goes on after the cookie has gone: notify it.
const tabs = new BroadcastChannel(`fairlane ${BASE}`);
tabs.onmessage = () => {
  for (const call of listeners) call();
};

export async function signOut(): Promise<void> {
  await request("DELETE", "/session");
  tabs.postMessage("signed out");
}

const CLOCKS_AGREE = 2;
let ahead = 0;

/** The time by the clock of the service, in seconds: that of the reader's machine may be wrong. */
export const serviceTime = (): number => Date.now() / 1000 + ahead;

function compareClocks(answer: Response): void {
  // The header has whole seconds.
  const difference = (Date.parse(answer.headers.get("Date") ?? "") + 500 - Date.now()) / 1000;
  if (!Number.isNaN(difference)) ahead = Math.abs(difference) > CLOCKS_AGREE ? difference : 0;
}

export async function failure(answer: Response): Promise<ApiError> {
  let detail = `the service responded with status ${answer.status}`;
  let field: string | null = null;
  try {
    const problem = await answer.json();
    detail = String(problem.detail ?? detail);
    field = problem.field ?? null;
  } catch {
    // No problem document: the status must do.
  }
  if (answer.status === 401) for (const call of listeners) call();
  return new ApiError(answer.status, field ? `${field}: ${detail}` : detail, field);
}

/** Milliseconds: a service that hangs must not keep a page waiting for ever. */
const PATIENCE = 30_000;

export async function request<T>(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<T> {
  let answer: Response;
  try {
    answer = await fetch(BASE + path, {
      method,
      signal: AbortSignal.any([AbortSignal.timeout(PATIENCE), ...(signal ? [signal] : [])]),
      credentials: "same-origin",
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    const late = error instanceof DOMException && error.name === "TimeoutError";
    throw new ApiError(0, late ? "the service did not answer in time" : "the service cannot be reached");
  }
  compareClocks(answer);
  if (!answer.ok) throw await failure(answer);
  return answer.status === 204 ? (undefined as T) : decode<T>(await answer.text());
}

export const get = <T>(path: string, signal?: AbortSignal): Promise<T> => request<T>("GET", path, undefined, signal);
export const post = <T>(path: string, body: unknown = {}): Promise<T> => request<T>("POST", path, body);

export function query(values: Record<string, string | number | null | undefined>): string {
  const given = Object.entries(values).filter(([, value]) => value != null && value !== "");
  return given.length ? `?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}` : "";
}

export const part = (text: string): string => encodeURIComponent(text);

/** The lines of a bulk change, as they arrive. */
export async function* lines<T>(path: string, body: unknown, signal: AbortSignal): AsyncGenerator<T> {
  const answer = await fetch(BASE + path, {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", Accept: "application/x-ndjson" },
    body: JSON.stringify(body),
  });
  if (!answer.ok || !answer.body) throw await failure(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop() ?? "";
    for (const each of parts) if (each) yield JSON.parse(each) as T;
  }
}

export const may = (session: Session, scope: string): boolean => session.scopes.includes(scope);
