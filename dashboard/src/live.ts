// Live data: one stream of events per page, and documents that are read again at an interval.
//
// A browser opens only a few connections to one service, so a page has one stream at most, and closes it while
// the page is in the background.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";

import { ApiError, BASE, failure, get, serviceTime } from "./api";
import { decode } from "./exact";

type Connection = "idle" | "connecting" | "live" | "lost" | "away";

let connection: Connection = "idle";
let restored = 0;
let refusal: ApiError | null = null;
const watchers = new Set<() => void>();

function note(next: Connection, why: ApiError | null = null): void {
  if (connection === next && refusal === why) return;
  connection = next;
  refusal = why;
  for (const each of watchers) each();
}

function useChanges(): void {
  const [, redraw] = useState(0);
  useEffect(() => {
    const call = () => redraw((n) => n + 1);
    watchers.add(call);
    return () => void watchers.delete(call);
  }, []);
}

/** The state of the stream of this page. */
export function useConnection(): Connection {
  useChanges();
  return connection;
}

/** Why the service refuses the stream of this page, if it does. */
export function useRefusal(): ApiError | null {
  useChanges();
  return refusal;
}

/** How often the connection came back: what was read before is to be read again. */
function useRestored(): number {
  useChanges();
  return restored;
}

const RETRY = 2_000;
/** A refusal lasts longer than an outage. */
const REFUSED = 10_000;
const HIDDEN = 20_000;
/** A stream that is silent for so long is checked: the browser does not notice a service that hangs. */
const SILENT = 10_000;
const CHECK = 2_000;
/** A check that comes so late was held up: the machine slept, and its connections may be dead. */
const SLEPT = 30_000;
const PATIENCE = 5_000;

const within = (signal: AbortSignal): AbortSignal => AbortSignal.any([signal, AbortSignal.timeout(PATIENCE)]);

/** Watch a stream. `take` gets the kind and the document of each event; return true from it to end the stream. */
export function useStream(path: string | null, kinds: readonly string[], take: (kind: string, data: never) => boolean | void): void {
  const latest = useRef(take);
  latest.current = take;
  useEffect(() => {
    if (path === null) {
      note("idle");
      return;
    }
    let source: EventSource | null = null;
    let retry: number | undefined;
    let hide: number | undefined;
    let over = false;
    let before = false;
    let heard = Date.now();
    let checked = heard;
    let checking = false;
    const abort = new AbortController();

    const close = () => {
      source?.close();
      source = null;
      clearTimeout(retry);
    };
    const live = () => {
      // However the stream was lost or given up: what was read before it came back may be old.
      if (connection !== "live" && (before || connection !== "connecting")) restored += 1;
      before = true;
      heard = Date.now();
      note("live");
    };
    const open = () => {
      close();
      const mine = new EventSource(BASE + path);
      source = mine;
      heard = Date.now();
      mine.onopen = live;
      mine.onerror = () => {
        if (connection !== "lost") note("lost");
        if (mine.readyState === EventSource.CLOSED) {
          source = null;
          void refused();
        }
      };
      for (const kind of kinds) {
        mine.addEventListener(kind, (event) => {
          const data = decode<{ store?: string }>((event as MessageEvent<string>).data);
          if (data.store === "away") note("away");
          else live();
          if (data.store !== "away" && latest.current(kind, data as never)) {
            over = true;
            clearTimeout(hide);
            close();
            note("idle");
          }
        });
      }
    };
    /** The service refused: see why, as a stream does not say it, then try again. A session may be over. */
    const refused = async () => {
      let why: ApiError | null = null;
      const asking = new AbortController();
      try {
        const answer = await fetch(BASE + path, { signal: within(AbortSignal.any([abort.signal, asking.signal])) });
        if (!answer.ok) why = await failure(answer);
      } catch {
        // It cannot be reached either.
      }
      asking.abort();
      if (abort.signal.aborted || source !== null) return;
      const lasting = why !== null && why.status < 500;
      note("lost", lasting ? why : null);
      retry = window.setTimeout(seen, lasting ? REFUSED : RETRY);
    };
    const check = async () => {
      const now = Date.now();
      const slept = now - checked > SLEPT;
      checked = now;
      if (source === null || document.hidden || checking) return;
      if (slept) open();
      else if (now - heard > SILENT) {
        checking = true;
        const mine = source;
        try {
          await fetch(`${BASE}/session`, { signal: within(abort.signal) });
          heard = Date.now();
          // It answers again: a stream that was opened meanwhile may still wait for an answer.
          if (connection === "lost" && source === mine) open();
        } catch {
          if (!abort.signal.aborted && source === mine) note("lost");
        } finally {
          checking = false;
        }
      }
    };
    const seen = () => {
      clearTimeout(hide);
      if (over) return;
      if (document.hidden) {
        hide = window.setTimeout(() => {
          close();
          note("idle");
        }, HIDDEN);
      } else if (source === null) {
        if (connection === "idle") note("connecting");
        open();
      }
    };
    note("connecting");
    seen();
    document.addEventListener("visibilitychange", seen);
    const checks = window.setInterval(() => void check(), CHECK);
    return () => {
      document.removeEventListener("visibilitychange", seen);
      clearTimeout(hide);
      clearInterval(checks);
      abort.abort();
      close();
    };
  }, [path, kinds.join()]);
}

export interface Loaded<T> {
  data: T | null;
  error: ApiError | null;
  again: () => void;
}

/** A document, read now, again after a lost connection or while the service is away, and every so many seconds. */
export function useData<T>(path: string | null, every = 0): Loaded<T> {
  const [data, setData] = useState<T | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const [count, setCount] = useState(0);
  const back = useRestored();
  const shown = useRef<string | null>(null);
  if (shown.current !== path) {
    shown.current = path;
    if (data !== null) setData(null);
  }
  useEffect(() => {
    if (path === null) return;
    const abort = new AbortController();
    let timer: number | undefined;
    let pause = every * 1000;
    const read = () => {
      pause = every * 1000;
      get<T>(path, abort.signal)
        .then((found) => {
          setData(found);
          setError(null);
        })
        .catch((problem) => {
          if (abort.signal.aborted) return;
          const found = problem instanceof ApiError ? problem : new ApiError(0, String(problem));
          setError(found);
          if (found.status === 0 || found.status >= 500) pause = Math.min(pause || RETRY, RETRY);
        })
        .finally(() => {
          if (pause && !abort.signal.aborted) timer = window.setTimeout(wait, pause);
        });
    };
    const wait = () => {
      if (document.hidden) timer = window.setTimeout(wait, pause);
      else read();
    };
    read();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [path, every, count, back]);
  return { data, error, again: useCallback(() => setCount((n) => n + 1), []) };
}

let now = serviceTime();
const ticking = new Set<() => void>();
window.setInterval(() => {
  now = serviceTime();
  if (!document.hidden) for (const each of ticking) each();
}, 1_000);

/** The time, once a second. */
export function useNow(): number {
  const [, redraw] = useState(0);
  useEffect(() => {
    const call = () => redraw((n) => n + 1);
    ticking.add(call);
    return () => void ticking.delete(call);
  }, []);
  return now;
}
