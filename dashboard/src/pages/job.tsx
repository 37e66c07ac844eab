import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";

import { BASE, part, post } from "../api";
import { indented, members, python } from "../exact";
import { clock, duration, exact, number, shell } from "../format";
import { useData, useNow, useRefusal, useStream } from "../live";
import { Action, Block, Class, Dialog, Fact, JobLink, LaneLink, Loading, Pill, Problem, queueHref, Text, Time, useMay } from "../parts";
import type { Job, JobSummary, JobUpdate } from "../types";

const FINAL = ["completed", "failed", "cancelled"];
/** If one of these changes, the history does too. */
const OF_A_RUN = ["state", "attempt", "fence", "cancel_requested"] as const;

export function JobPage({ id }: { id: string }) {
  const read = useData<Job>(`/jobs/${part(id)}`);
  const [update, setUpdate] = useState<JobUpdate | null>(null);
  const fresh = update && update.id === id ? update : null;
  const refusal = useRefusal();
  useStream(read.data && !FINAL.includes(read.data.state) ? `/jobs/${part(id)}/events` : null, ["state", "position", "progress", "gone"], (kind, data) => {
    if (kind === "gone") {
      read.again();
      return true;
    }
    const next = data as JobUpdate;
    const known = fresh ?? read.data;
    if (known && OF_A_RUN.some((name) => next[name] !== known[name])) read.again();
    setUpdate(next);
    return next.final;
  });
  if (!read.data || read.error?.status === 404) return read.error ? <Missing id={id} error={read.error} /> : <Loading />;
  const live = fresh && !FINAL.includes(read.data.state) ? fresh : null;
  const job: Job = live ? { ...read.data, ...live, error: live.error ?? read.data.error, progress: live.progress ?? read.data.progress } : read.data;
  return (
    <>
      <Problem error={read.error} again={read.again} />
      <Problem error={refusal} />
      <JobView job={job} again={read.again} />
    </>
  );
}

function Missing({ id, error }: { id: string; error: NonNullable<ReturnType<typeof useData>["error"]> }) {
  return (
    <>
      <h1>
        <Text most={60}>{id}</Text>
      </h1>
      <Problem error={error} />
      {error.status === 404 && <p class="quiet">Finished jobs are kept until their retention is over; see docs/configuration.md.</p>}
    </>
  );
}

function JobView({ job, again }: { job: Job; again: () => void }) {
  const operate = useMay("operate");
  const over = FINAL.includes(job.state);
  return (
    <>
      <header class="head">
        <p class="crumbs">
          <a href="#/">Overview</a> /{" "}
          <a href={queueHref(job.queue)}>
            <Text most={60}>{job.queue}</Text>
          </a>{" "}
          / <LaneLink queue={job.queue} lane={job.lane} /> / job
        </p>
        <h1>
          <Text most={100}>{job.task}</Text> <Pill state={job.state} /> <Class of={job.priority} />
        </h1>
        <p class="id tabular">
          <Text>{job.id}</Text>
        </p>
        <div class="actions">
          {operate && !over && (
            <Action kind="danger" run={() => post(`/jobs/${part(job.id)}/cancel`).then(again)}>
              {job.state === "running" ? "Ask it to stop" : "Cancel"}
            </Action>
          )}
          {operate && over && (
            <Action
              run={async () => {
                const made = await post<{ id: string }>(`/jobs/${part(job.id)}/retry`);
                location.hash = `#/jobs/${encodeURIComponent(made.id)}`;
              }}
            >
              Run again
            </Action>
          )}
          <Copy name="Copy as Python" text={() => asPython(job)} />
          <Copy name="Copy as curl" text={() => asCurl(job)} />
        </div>
      </header>
      <Why job={job} />
      <Attempts job={job} />
      {job.progress !== null && (
        <Section title="Progress">
          <Progress value={job.progress} />
        </Section>
      )}
      {job.error !== null && (
        <Section title={over ? "Error" : "Last error"}>
          <Block text={job.error} label="Error with traceback" />
        </Section>
      )}
      {job.state === "completed" && (
        <Section title="Result">
          <Block text={indented(job.result ?? "null")} label="Result" />
        </Section>
      )}
      <Section title="Arguments">
        <Arguments job={job} />
      </Section>
      <Section title="Facts">
        <dl class="facts">
          <Fact name="Sent">
            <Time at={job.enqueued_at} />
          </Fact>
          {job.due_at !== null && (
            <Fact name="Due">
              <Time at={job.due_at} />
            </Fact>
          )}
          {job.kind !== "broadcast" && (
            <Fact name="Attempts">{job.attempt <= job.retries + 1 ? `${job.attempt} of ${job.retries + 1}` : job.attempt}</Fact>
          )}
          <Fact name="Timeout">{job.timeout === null ? "none" : duration(job.timeout)}</Fact>
          {job.expires_at !== null && (
            <Fact name="Expires">
              <Time at={job.expires_at} />
            </Fact>
          )}
          {job.unique !== null && (
            <Fact name="Unique">
              <Text most={60}>{job.unique}</Text>
            </Fact>
          )}
          {job.cost !== 1 && <Fact name="Cost">{job.cost}</Fact>}
          {job.suspect && <Fact name="Suspect">its process died; it runs in a process of its own</Fact>}
          {job.retry_of !== null && (
            <Fact name="Retry of">
              <JobLink id={job.retry_of} />
            </Fact>
          )}
          {job.parent !== null && (
            <Fact name="Copy of broadcast">
              <JobLink id={job.parent} />
            </Fact>
          )}
          {job.sticky !== null && (
            <Fact name="Sticky key">
              <a href={`#/search?q=${encodeURIComponent(job.sticky)}`}>
                <Text most={60}>{job.sticky}</Text>
              </a>
            </Fact>
          )}
        </dl>
      </Section>
      {job.kind === "broadcast" && <Copies id={job.id} />}
    </>
  );
}

function Section({ title, children }: { title: string; children: ComponentChildren }) {
  return (
    <section>
      <h2>{title}</h2>
      {children}
    </section>
  );
}

/** Why a job waits, where it runs or how it ended; its times are those of the reader. */
function WhyText({ job }: { job: Job }) {
  if (job.state === "running") {
    return (
      <>
        running on <Text>{job.worker ?? "a worker"}</Text>
        {job.attempt > 0 && `, attempt ${job.attempt}`}
        {job.cancel_requested && ", asked to stop"}
      </>
    );
  }
  if (job.state === "scheduled" && job.due_at !== null) {
    return (
      <>
        due <Time at={job.due_at} />
      </>
    );
  }
  if (job.state === "cancelled" && job.reason !== null) return <>cancelled ({inWords(job.reason)})</>;
  return <Text>{job.why}</Text>;
}

const inWords = (reason: string): string => reason.replaceAll("_", " ");

function Why({ job }: { job: Job }) {
  const position = job.position;
  return (
    <section class={`standing ${job.state}`} aria-label="Where it stands">
      {position && (
        <p class="place-big">
          <span class="big">{number(position.place)}</span>
          <span class="quiet">
            {" "}
            of {position.of_exact ? "" : "about "}
            {number(position.of)} in its lane
            {!position.exact && " (at least)"}
          </span>
        </p>
      )}
      <p class="why-text" role="status">
        <WhyText job={job} />
      </p>
      {position && (
        <p class="quiet">
          {job.eta === null ? "No estimate yet." : `Starts in about ${duration(job.eta)}.`} {position.queue_ahead > 0 && `About ${number(position.queue_ahead)} of the queue start before it.`}
        </p>
      )}
      {job.state === "running" && job.started_at !== null && (
        <p class="quiet">
          started <Time at={job.started_at} />
        </p>
      )}
      {FINAL.includes(job.state) && job.finished_at !== null && (
        <p class="quiet">
          ended <Time at={job.finished_at} />
          {job.started_at !== null && `, ${howItRan(job, job.started_at, job.finished_at)}`}
        </p>
      )}
    </section>
  );
}

/** How a job that ended has run; of several runs, the timeline has the others. */
function howItRan(job: Job, started: number, finished: number): string {
  const ran = duration(finished - started);
  if (job.fence > 1) return `its last run took ${ran}`;
  // Not all of it was a wait: it may have been sent for later.
  return `started ${duration(started - job.enqueued_at)} after it was sent, ran ${ran}`;
}

function Attempts({ job }: { job: Job }) {
  const now = useNow();
  const begin = job.enqueued_at;
  const end = Math.max(job.finished_at ?? now, begin + 0.001);
  const scale = (at: number) => `${Math.min(100, Math.max(0, ((at - begin) / (end - begin)) * 100))}%`;
  const rows: { key: string; kind: string; from: number; to: number; what: string; note: string }[] = [];
  let last = begin;
  if (!job.attempts.length && job.started_at !== null) {
    // A broadcast has copies that run; it lasts until they have ended.
    rows.push({ key: "all", kind: job.state === "completed" ? "done" : job.state === "failed" ? "bad" : "run", from: job.started_at, to: end, what: job.state, note: "" });
    last = end;
  }
  for (const run of job.attempts) {
    if (run.started_at - last > 0.0005) rows.push({ key: `w${run.fence}`, kind: "wait", from: last, to: run.started_at, what: "waited", note: "" });
    const to = run.ended_at ?? end;
    const how = run.ended_at === null ? "running" : (run.outcome ?? run.state ?? "ended");
    const kind = run.ended_at === null ? "run" : run.state === "completed" ? "done" : run.error || run.state === "failed" ? "bad" : "other";
    rows.push({ key: `r${run.fence}`, kind, from: run.started_at, to, what: how, note: `${run.worker}${run.reason ? `, ${inWords(run.reason)}` : ""}` });
    last = to;
  }
  if (!FINAL.includes(job.state) && job.state !== "running") rows.push({ key: "now", kind: "wait", from: last, to: end, what: "waiting", note: "" });
  // It was cancelled or expired before it ran, or ran again.
  else if (job.state === "cancelled" && end - last > 0.0005) rows.push({ key: "end", kind: "wait", from: last, to: end, what: "waited", note: inWords(job.reason ?? "") });
  return (
    <Section title="Timeline">
      <ol class="timeline">
        {rows.map((row) => (
          <li key={row.key}>
            <time class="tabular" title={exact(row.from)}>
              {clock(row.from)}
            </time>
            <span class={`what ${row.kind}`}>{row.what}</span>
            <span class="n">{duration(row.to - row.from)}</span>
            <span class="track" aria-hidden="true">
              <i class={row.kind} style={{ left: scale(row.from), width: `max(2px, calc(${scale(row.to)} - ${scale(row.from)}))` }} />
            </span>
            <span class="quiet note">
              <Text most={80}>{row.note}</Text>
            </span>
          </li>
        ))}
      </ol>
    </Section>
  );
}

function Progress({ value }: { value: string }) {
  const part = Number(members(value).find(([name]) => name === "percent")?.[1] ?? NaN);
  return (
    <>
      {Number.isFinite(part) && <progress aria-label="Progress" max={100} value={part} />}
      <Block text={indented(value)} label="Progress" />
    </>
  );
}

function Arguments({ job }: { job: Job }) {
  const [args, kwargs] = argumentsOf(job);
  if (args === NONE && kwargs === NO_NAMES) return <p class="quiet">It has none.</p>;
  return (
    <>
      {args !== NONE && <Block text={indented(args)} label="Arguments by position" />}
      {kwargs !== NO_NAMES && <Block text={indented(kwargs)} label="Arguments by name" />}
    </>
  );
}

const NONE = "[]";
const NO_NAMES = "{}";

/** The arguments by position and by name, as JSON. */
function argumentsOf(job: Job): [string, string] {
  const [args, kwargs] = members(job.payload ?? NONE).map(([, value]) => value);
  return [args && members(args).length ? args : NONE, kwargs && members(kwargs).length ? kwargs : NO_NAMES];
}

function Copies({ id }: { id: string }) {
  const copies = useData<{ jobs: JobSummary[] }>(`/jobs/${part(id)}/copies`, 2);
  return (
    <Section title="Copies">
      {copies.data?.jobs.length === 0 && <p class="quiet">No worker has claimed it yet.</p>}
      <ul class="plain">
        {copies.data?.jobs.map((job) => (
          <li key={job.id}>
            <JobLink id={job.id} /> <Pill state={job.state} /> <span class="quiet">{job.worker}</span>
          </li>
        ))}
      </ul>
    </Section>
  );
}

function options(job: Job): Record<string, string> {
  const found: Record<string, string> = { queue: job.queue };
  if (job.lane !== null) found.lane = job.lane;
  if (job.priority !== "normal") found.priority = job.priority;
  if (job.sticky !== null) found.sticky = job.sticky;
  return found;
}

function asPython(job: Job): string {
  const [args, kwargs] = argumentsOf(job);
  const words = [JSON.stringify(job.task)];
  if (args !== NONE) words.push(`args=${python(args)}`);
  if (kwargs !== NO_NAMES) words.push(`kwargs=${python(kwargs)}`);
  for (const [name, value] of Object.entries(options(job))) words.push(`${name}=${JSON.stringify(value)}`);
  const service = JSON.stringify(location.origin + BASE.replace(/\/api\/v1$/, ""));
  return `from fairlane.http import Client\n\nwith Client(${service}) as client:  # add your token as the second argument\n    job = client.send(${words.join(", ")})\n    print(job.id)\n`;
}

function asCurl(job: Job): string {
  const [args, kwargs] = argumentsOf(job);
  const body = `{"task":${JSON.stringify(job.task)},"args":${args},"kwargs":${kwargs},"options":${JSON.stringify(options(job))}}`;
  return `curl ${shell(`${location.origin}${BASE}/jobs`)} \\\n  -H 'Content-Type: application/json' \\\n  -d ${shell(body)}\n`;
}

function Copy({ name, text }: { name: string; text: () => string }) {
  const [shown, setShown] = useState<string | null>(null);
  const [copied, setCopied] = useState(false);
  return (
    <>
      <button
        type="button"
        onClick={() => {
          const made = text();
          setShown(made);
          setCopied(false);
          // Not every origin may write to the clipboard; the text is shown in any case.
          void navigator.clipboard?.writeText(made).then(
            () => setCopied(true),
            () => undefined,
          );
        }}
      >
        {name}
      </button>
      {shown !== null && (
        <Dialog title={name} close={() => setShown(null)}>
          <Block text={shown} label="Text to copy" whole />
          <p role="status" class="quiet">
            {copied ? "Copied." : "Select the text and copy it."}
          </p>
          <div class="buttons">
            <button type="button" class="main" onClick={() => setShown(null)}>
              Close
            </button>
          </div>
        </Dialog>
      )}
    </>
  );
}
