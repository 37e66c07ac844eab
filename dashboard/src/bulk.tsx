// A change of many jobs: it counts first, asks, shows its progress, and can be stopped.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { lines, post } from "./api";
import { plural, visible } from "./format";
import { Dialog } from "./parts";
import type { Bulk } from "./types";

type Step = { at: "counting" } | { at: "asking"; count: Bulk } | { at: "working"; so: Bulk | null } | { at: "over"; so: Bulk | null; stopped: boolean } | { at: "failed"; why: string };

export function BulkButton({
  verb,
  selection,
  title,
  children,
  done,
}: {
  verb: "retry" | "cancel";
  selection: Record<string, unknown>;
  title: string;
  children: ComponentChildren;
  done: () => void;
}) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" onClick={() => setOpen(true)}>
        {children}
      </button>
      {open && (
        <BulkDialog
          verb={verb}
          selection={selection}
          title={title}
          close={() => {
            setOpen(false);
            done();
          }}
        />
      )}
    </>
  );
}

const PAST = { retry: "sent again", cancel: "cancelled" };
/** Jobs that one change may examine: all of them, where the dry run counts only the first. */
const MOST = 1_000_000;

/** What was changed: a running job ends later, or not at all. */
function changes(verb: "retry" | "cancel", so: Bulk | null): string {
  const asked = so?.requested ?? 0;
  const all = `${plural(so?.changed ?? 0, "job")} ${PAST[verb]}`;
  return asked ? `${all}, ${plural(asked, "running job")} asked to stop.` : `${all}.`;
}

/** What was not changed, and why. */
function left(so: Bulk | null): string {
  const reasons = Object.entries(so?.unchanged ?? {}).map(([why, count]) => ` ${plural(count, "job")} left: ${why.replaceAll("_", " ")}.`);
  return reasons.join("") + (so?.refusal ? ` ${visible(so.refusal)}` : "");
}

/** The jobs that will be changed: a dry run also counts those that it would leave alone. */
const due = (count: Bulk) => count.matched - Object.values(count.unchanged).reduce((sum, each) => sum + each, 0);

function BulkDialog({ verb, selection, title, close }: { verb: "retry" | "cancel"; selection: Record<string, unknown>; title: string; close: () => void }) {
  const [step, setStep] = useState<Step>({ at: "counting" });
  const abort = useRef<AbortController | null>(null);
  useEffect(() => {
    post<Bulk>(`/jobs:${verb}`, { ...selection, dry_run: true }).then(
      (count) => setStep({ at: "asking", count }),
      (problem) => setStep({ at: "failed", why: String(problem.message ?? problem) }),
    );
    return () => abort.current?.abort();
  }, []);
  const work = async () => {
    const mine = (abort.current = new AbortController());
    let so: Bulk | null = null;
    setStep({ at: "working", so });
    try {
      for await (const each of lines<Bulk>(`/jobs:${verb}`, { ...selection, most: MOST }, mine.signal)) {
        if (each.problem) throw new Error(each.problem.detail);
        so = each;
        setStep({ at: "working", so });
      }
      setStep({ at: "over", so, stopped: false });
    } catch (problem) {
      if (mine.signal.aborted) setStep({ at: "over", so, stopped: true });
      else setStep({ at: "failed", why: problem instanceof Error ? problem.message : String(problem) });
    }
  };
  const changed = (so: Bulk | null) => (so ? so.changed + so.requested : 0);
  return (
    <Dialog title={title} close={close}>
      <div role="status">
        {step.at === "counting" && <p>Counting …</p>}
        {step.at === "asking" && (
          <p>
            {step.count.matched === 0 ? "No job matches." : `${step.count.more ? "More than " : ""}${plural(due(step.count), "job")} will be ${PAST[verb]}.${verb === "cancel" ? " Those that run are asked to stop." : ""}${left(step.count)}`}
          </p>
        )}
        {step.at === "working" && (
          <>
            <progress aria-label="Progress" />
            <p class="tabular">{plural(changed(step.so), "job")} so far.</p>
          </>
        )}
        {step.at === "over" && (
          <p>
            {step.stopped ? "Stopped. " : ""}
            {changes(verb, step.so)}{left(step.so)}{step.so?.more && !step.stopped ? " There are more: run it again." : ""}
          </p>
        )}
        {step.at === "failed" && (
          <p class="problem" role="alert">
            {visible(step.why)}
          </p>
        )}
      </div>
      <div class="buttons">
        {step.at === "asking" && due(step.count) > 0 && (
          <button type="button" class="main" onClick={() => void work()}>
            {verb === "retry" ? "Send again" : "Cancel them"}
          </button>
        )}
        {step.at === "working" && (
          <button type="button" onClick={() => abort.current?.abort()}>
            Stop
          </button>
        )}
        <button type="button" onClick={close}>
          Close
        </button>
      </div>
    </Dialog>
  );
}
