// Small parts that all pages share.

import type { ComponentChildren, HTMLAttributes } from "preact";
import { createContext } from "preact";
import { useContext, useEffect, useId, useLayoutEffect, useRef, useState } from "preact/hooks";

import { ApiError, may } from "./api";
import { duration, exact, number, relative, shortened, visible } from "./format";
import { useNow } from "./live";
import type { Priority, Session, State, Worker } from "./types";
import { PRIORITIES } from "./types";

export const SessionContext = createContext<Session>({
  caller: "",
  scopes: [],
  bound: false,
  queues: null,
  lane_prefix: null,
  cookie: false,
  version: "",
  features: [],
});

export const useMay = (scope: string): boolean => may(useContext(SessionContext), scope);

/** Text of a user: isolated, so that its direction changes nothing around it. */
export function Text({ children, most = 200 }: { children: string; most?: number }) {
  const whole = visible(children);
  const short = shortened(whole, most);
  return (
    <bdi class="text" title={whole.length > 24 ? shortened(whole, 2_000) : undefined}>
      {short}
    </bdi>
  );
}

const FOLD = 4_000;

/** A long text of a user, folded when it is very long. */
export function Block({ text, label, whole = false }: { text: string; label: string; whole?: boolean }) {
  const [open, setOpen] = useState(whole);
  const folded = !open && text.length > FOLD;
  const shown = visible(folded ? text.slice(0, FOLD) : text);
  return (
    <div class="block">
      <pre tabIndex={0} aria-label={label} dir="ltr">
        {shown}
        {folded && "…"}
      </pre>
      {!whole && text.length > FOLD && (
        <button type="button" class="link" onClick={() => setOpen(!open)} aria-expanded={open}>
          {open ? "Show less" : `Show all ${number(text.length)} characters`}
        </button>
      )}
    </div>
  );
}

/** A moment, relative to now; the exact one on hover. */
export function Time({ at, none = "–" }: { at: number | null | undefined; none?: string }) {
  const now = useNow();
  if (at == null) return <span class="quiet">{none}</span>;
  return (
    <time dateTime={new Date(at * 1000).toISOString()} title={exact(at)}>
      {relative(at, now)}
    </time>
  );
}

/** How long something has lasted. */
export function Since({ at }: { at: number }) {
  const now = useNow();
  return <time title={exact(at)}>{duration(Math.max(0, Math.round(now - at)))}</time>;
}

export function Pill({ state }: { state: State | Worker["state"] | "open" | "draining" | "released" | "lost" | "paused" }) {
  return <span class={`pill ${state}`}>{state}</span>;
}

export function Class({ of }: { of: Priority }) {
  return of === "normal" ? null : <span class={`class ${of}`}>{of}</span>;
}

export function JobLink({ id, children }: { id: string; children?: ComponentChildren }) {
  return (
    <a class="id" href={`#/jobs/${encodeURIComponent(id)}`}>
      {children ?? <Text most={36}>{id}</Text>}
    </a>
  );
}

export const laneHref = (queue: string, lane: string | null): string =>
  `#/queues/${encodeURIComponent(queue)}/lanes/${lane === null ? "" : encodeURIComponent(lane)}`;

export const queueHref = (queue: string): string => `#/queues/${encodeURIComponent(queue)}`;

export function LaneLink({ queue, lane }: { queue: string; lane: string | null }) {
  return <a href={laneHref(queue, lane)}>{lane === null ? <span class="quiet">no lane</span> : <Text most={80}>{lane}</Text>}</a>;
}

/** Nothing to show, and the command that changes this. */
export function Empty({ title, children, command }: { title: string; children?: ComponentChildren; command?: string }) {
  return (
    <div class="empty">
      <p class="empty-title">{title}</p>
      {children && <p>{children}</p>}
      {command && (
        <p>
          <code>{visible(command)}</code>
        </p>
      )}
    </div>
  );
}

export function Problem({ error, again }: { error: ApiError | null; again?: () => void }) {
  if (!error) return null;
  return (
    <p class="problem" role="alert">
      {visible(error.message)}
      {again && (
        <button type="button" class="link" onClick={again}>
          Try again
        </button>
      )}
    </p>
  );
}

export function Loading() {
  return (
    <div class="loading" aria-busy="true">
      <span class="sr">Loading</span>
    </div>
  );
}

/** A button that does something on the service: disabled while it works, and it says what went wrong. */
export function Action({
  children,
  run,
  kind = "",
  label,
}: {
  children: ComponentChildren;
  run: () => Promise<unknown>;
  kind?: string;
  label?: string;
}) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const there = useRef(true);
  useEffect(() => () => void (there.current = false), []);
  const click = async () => {
    setBusy(true);
    setError(null);
    try {
      await run();
    } catch (problem) {
      if (there.current) setError(problem instanceof Error ? problem.message : String(problem));
    } finally {
      if (there.current) setBusy(false);
    }
  };
  return (
    <span class="action">
      <button type="button" class={kind} aria-disabled={busy} aria-label={label} onClick={() => void (busy || click())}>
        {children}
      </button>
      {error && (
        <span class="problem" role="alert">
          {visible(error)}
        </span>
      )}
    </span>
  );
}

export function Dialog({ title, close, children }: { title: string; close: () => void; children: ComponentChildren }) {
  const ref = useRef<HTMLDialogElement>(null);
  const id = useId();
  useLayoutEffect(() => {
    const before = document.activeElement as HTMLElement | null;
    const dialog = ref.current;
    dialog?.showModal();
    return () => {
      // What is behind an open dialog cannot be focused.
      dialog?.close();
      before?.focus?.();
    };
  }, []);
  return (
    <dialog ref={ref} aria-labelledby={id} onClose={close}>
      <h2 id={id}>{title}</h2>
      {children}
    </dialog>
  );
}

const MOST_SLOTS = 64;

/** A worker's slots: running by class, free, and kept free for a class. */
export function Slots({ worker }: { worker: Worker }) {
  const total = worker.slots?.total ?? 0;
  const high = Math.max(0, (worker.slots?.reserved?.high ?? 0) - worker.classes.high);
  const normal = worker.slots?.reserved?.normal ?? 0;
  const kept = Math.min(high, total - worker.running);
  const keptNormal = Math.max(0, Math.min(normal - worker.classes.normal, total - worker.running - kept));
  const free = Math.max(0, total - worker.running - kept - keptNormal);
  const each: [string, number][] = [
    ...PRIORITIES.map((name): [string, number] => [`run ${name}`, worker.classes[name]]),
    ["free", free],
    ["kept normal", keptNormal],
    ["kept high", kept],
  ];
  const words = [
    `${worker.running} of ${total} slots running`,
    free ? `${free} free` : "",
    kept ? `${kept} reserved for high` : "",
    keptNormal ? `${keptNormal} reserved for normal` : "",
  ].filter(Boolean);
  const scale = Math.max(1, total / MOST_SLOTS);
  return (
    <span class="slots" role="img" aria-label={words.join(", ")} title={words.join(", ")}>
      {each.flatMap(([kind, count]) => Array.from({ length: Math.round(count / scale) }, (_, n) => <i key={kind + n} class={kind} />))}
    </span>
  );
}

/** The class of a number: coloured, unless it is zero. */
export const tone = (name: string, count: number): string => (count ? `n ${name}` : "n quiet");

/** A fraction as a thin bar, with a tick where it should be. */
export function Share({ used, fair, label }: { used: number | null | undefined; fair: number | null; label: string }) {
  return (
    <span class="share" role="img" aria-label={label} title={label}>
      <i style={{ width: `${Math.min(1, used ?? 0) * 100}%` }} />
      {fair !== null && <b style={{ left: `${Math.min(1, fair) * 100}%` }} />}
    </span>
  );
}

export function Fact({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <div class="fact">
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

/** A table in a frame that scrolls sideways on a narrow screen. */
export function Table({ caption, head, children, ...rest }: { caption: string; head: ComponentChildren; children: ComponentChildren } & HTMLAttributes<HTMLDivElement>) {
  return (
    <div class="frame" tabIndex={0} role="region" aria-label={caption} {...rest}>
      <table>
        <caption class="sr">{caption}</caption>
        <thead>
          <tr>{head}</tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

/** Whether a reader points at or works in an element: what is in it must not move now. */
export function useHand(): [boolean, HTMLAttributes<HTMLDivElement>] {
  const [over, setOver] = useState(false);
  const [focused, setFocused] = useState(false);
  return [
    over || focused,
    {
      onPointerEnter: (event) => event.pointerType === "mouse" && setOver(true),
      onPointerLeave: () => setOver(false),
      onFocusIn: () => setFocused(true),
      onFocusOut: () => setFocused(false),
    },
  ];
}

/** The keys in their order; while `held`, in the order in which the reader saw them, new ones at the end. */
export function useOrder(keys: string[], held: boolean): string[] {
  const seen = useRef<string[]>(keys);
  if (held) {
    const now = new Set(keys);
    const kept = seen.current.filter((key) => now.has(key));
    const known = new Set(kept);
    seen.current = [...kept, ...keys.filter((key) => !known.has(key))];
  } else {
    seen.current = keys;
  }
  return seen.current;
}
