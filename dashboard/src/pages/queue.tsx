import { useRef, useState } from "preact/hooks";

import { part, post, query, request } from "../api";
import { duration, number, percent, plural, shell, visible } from "../format";
import { useData, useStream } from "../live";
import { Action, Class, Dialog, Empty, Fact, JobLink, LaneLink, laneHref, Loading, Problem, Share, Since, Table, Text, tone, useHand, useMay, useOrder } from "../parts";
import type { Lane, LanesEvent, NextJob, QueueDetail } from "../types";

const key = (lane: Lane): string => (lane.lane === null ? "" : `=${lane.lane}`);

export function QueuePage({ name }: { name: string }) {
  const [event, setEvent] = useState<LanesEvent | null>(null);
  const detail = useData<QueueDetail>(`/queues/${part(name)}`);
  useStream(detail.data ? `/queues/${part(name)}/events` : null, ["lanes"], (_, data) => setEvent(data as LanesEvent));
  const queue = event?.queue ?? detail.data;
  const operate = useMay("operate");
  const steer = (verb: string, body: unknown = {}) => post(`/queues/${part(name)}/${verb}`, body).then(detail.again);
  return (
    <>
      <header class="head">
        <p class="crumbs">
          <a href="#/">Overview</a> / queue
        </p>
        <h1>
          <Text>{name}</Text> {queue?.paused && <span class="pill paused">paused</span>}
        </h1>
        {operate && queue && (
          <div class="actions">
            {queue.paused ? <Action run={() => steer("resume")}>Resume</Action> : <Action run={() => steer("pause")}>Pause</Action>}
            <LimitButton title={`Limit of ${name}`} limit={queue.limit} set={(limit) => request("PUT", `/queues/${part(name)}/limit`, { limit }).then(detail.again)} clear={queue.overridden ? () => steer("clear-limit") : null} />
          </div>
        )}
      </header>
      <Problem error={detail.error} again={detail.again} />
      {queue && (
        <dl class="facts">
          <Fact name="Waiting">
            <b class="wait">{number(queue.pending)}</b>
          </Fact>
          <Fact name="Running">
            <b class="run">{number(queue.running)}</b>
            {queue.limit !== null && <span class="quiet"> of {number(queue.limit)}</span>}
          </Fact>
          <Fact name="For later">{number(queue.scheduled)}</Fact>
          <Fact name="Oldest wait">{duration(queue.oldest_wait)}</Fact>
          <Fact name="Workers">{queue.workers ? number(queue.workers) : <span class={queue.pending ? "bad" : ""}>none</span>}</Fact>
          <Fact name="Completed">{number(queue.completed)}</Fact>
          <Fact name="Failed">{queue.failed ? <b class="bad">{number(queue.failed)}</b> : "0"}</Fact>
          <Fact name="At most waiting">{queue.max_pending === null ? "no limit" : number(queue.max_pending)}</Fact>
        </dl>
      )}
      {detail.error ? null : event === null ? <Loading /> : <Body name={name} event={event} steer={operate ? steer : null} />}
    </>
  );
}

type Steer = (verb: string, body?: unknown) => Promise<unknown>;

const PAGE = 100;
const MOST = 500;
const REMEMBERED = 60_000;
/** Seconds after which lanes that no event has are read again. */
const READ_AGAIN = 3;

/** The lanes to show: the longest ones of the event, and behind them those that were read, as far as they are not
 *  longer: such a lane would be in the event if it still were. Where a queue has very many lanes, each event has a
 *  sample of them: a lane that was shown stays, and another one takes its place only if it is longer or the lane was
 *  not seen for a minute. */
function useLanes(event: LanesEvent, loaded: Lane[]): Map<string, Lane> {
  const known = useRef(new Map<string, { lane: Lane; seen: number }>());
  const taken = useRef<Lane[]>([]);
  const room = Math.max(PAGE, loaded.length);
  const now = Date.now();
  if (event.exact) {
    known.current = new Map(event.lanes.map((lane) => [key(lane), { lane, seen: now }]));
    const shortest = event.lanes.at(-1)?.pending ?? 0;
    if (event.cursor !== null) {
      for (const lane of loaded) if (lane.pending <= shortest && !known.current.has(key(lane))) known.current.set(key(lane), { lane, seen: now });
    }
  } else {
    const kept = known.current;
    if (taken.current !== loaded) {
      taken.current = loaded;
      for (const lane of loaded) if (kept.size < room || kept.has(key(lane))) kept.set(key(lane), { lane, seen: now });
    }
    const others = [];
    for (const lane of event.lanes) {
      const found = kept.get(key(lane));
      if (found) kept.set(key(lane), { lane, seen: Math.max(now, found.seen) });
      else others.push(lane);
    }
    for (const [name, each] of kept) if (now - each.seen > REMEMBERED) kept.delete(name);
    for (const lane of others) {
      if (kept.size >= room) {
        const [least, { lane: shortest }] = [...kept].reduce((a, b) => (b[1].lane.pending < a[1].lane.pending ? b : a));
        if (shortest.pending >= lane.pending) break;
        kept.delete(least);
      }
      kept.set(key(lane), { lane, seen: now });
    }
  }
  const sorted = [...known.current].sort(([, a], [, b]) => b.lane.pending - a.lane.pending || b.lane.running - a.lane.running || (a.lane.lane ?? "").localeCompare(b.lane.lane ?? ""));
  return new Map(sorted.map(([name, each]) => [name, each.lane]));
}

function Body({ name, event, steer }: { name: string; event: LanesEvent; steer: Steer | null }) {
  const [held, hand] = useHand();
  const [most, setMost] = useState(0);
  const more = useData<{ lanes: Lane[] }>(most ? `/queues/${part(name)}/lanes${query({ limit: most })}` : null, READ_AGAIN);
  const loaded = useRef<Lane[]>([]);
  if (more.data) loaded.current = more.data.lanes;
  const live = useLanes(event, loaded.current);
  const order = useOrder([...live.keys()], held);
  const longest = Math.max(1, ...[...live.values()].map((lane) => lane.pending + lane.running));
  return (
    <div class="split">
      <section aria-labelledby="lanes-title" class="main-part">
        <h2 id="lanes-title">
          Lanes <span class="quiet">{event.cursor ? `the ${number(order.length)} longest` : plural(order.length, "lane")} with jobs</span>
        </h2>
        {order.length === 0 ? (
          <Empty title="No lane has a job" command={`fairlane jobs --queue ${shell(name)}`}>
            A lane is there while it has waiting or running jobs. Finished jobs are listed by the command below.
          </Empty>
        ) : (
          <Table
            caption="Lanes with their waiting and running jobs"
            {...hand}
            head={
              <>
                <th scope="col">Lane</th>
                <th scope="col" class="bar-cell">
                  Running, waiting
                </th>
                <th scope="col" class="n">Waiting</th>
                <th scope="col" class="n">Running</th>
                <th scope="col" class="n">Weight</th>
                <th scope="col" class="share-cell">
                  Used share <span class="quiet">▏fair</span>
                </th>
                <th scope="col" class="n">Oldest</th>
                {steer && (
                  <th scope="col">
                    <span class="sr">Actions</span>
                  </th>
                )}
              </>
            }
          >
            {order.map((each) => (
              <LaneRow key={each} lane={live.get(each)!} longest={longest} steer={steer} measured={event.measured_seconds} />
            ))}
          </Table>
        )}
        <p class="legend">
          <span class="key run normal">running</span> <span class="key wait normal">waiting</span>
          <span class="quiet"> The used share is that of the running time in the last {duration(Math.max(1, event.measured_seconds))}; the tick is the fair share by weight.</span>
        </p>
        <Problem error={more.error} />
        {event.cursor &&
          (order.length < MOST ? (
            <button type="button" onClick={() => setMost(Math.min(MOST, Math.max(PAGE, order.length) + PAGE))}>
              Show more lanes
            </button>
          ) : (
            <p class="quiet">Search for a lane to see one that is not shown.</p>
          ))}
      </section>
      <section aria-labelledby="next-title" class="side-part">
        <h2 id="next-title">
          Starts next <span class="quiet">{event.queue?.paused ? "once the queue is resumed" : "in the estimated order"}</span>
        </h2>
        <NextUp queue={name} jobs={event.next} waiting={event.queue?.pending ?? 0} />
      </section>
    </div>
  );
}

function LaneRow({ lane, longest, steer, measured }: { lane: Lane; longest: number; steer: Steer | null; measured: number }) {
  const label = `used ${percent(lane.used)} of the running time in the last ${duration(Math.max(1, measured))}, fair share ${percent(lane.share)}`;
  const bar = `${lane.running} running, ${lane.pending} waiting`;
  return (
    <tr data-lane={lane.lane ?? ""}>
      <th scope="row">
        <LaneLink queue={lane.queue} lane={lane.lane} /> {lane.paused && <span class="pill paused">paused</span>}
        {lane.ordered && <span class="quiet"> in order</span>}
      </th>
      <td class="bar-cell">
        <span class="bar" role="img" aria-label={bar} title={bar}>
          {lane.running > 0 && <i class="run normal" style={{ width: `max(3px, ${(lane.running / longest) * 100}%)` }} />}
          {lane.pending > 0 && <i class="wait normal" style={{ width: `max(3px, ${(lane.pending / longest) * 100}%)` }} />}
        </span>
      </td>
      <td class={tone("wait", lane.pending)}>
        {!lane.exact && "~"}
        {number(lane.pending)}
      </td>
      <td class={tone("run", lane.running)}>
        {number(lane.running)}
        {lane.own_limit !== null && <span class="quiet">/{lane.own_limit}</span>}
      </td>
      <td class="n">{lane.weight === 1 ? <span class="quiet">1</span> : lane.weight}</td>
      <td class="share-cell">
        <Share used={lane.used} fair={lane.share} label={label} />
        <span class="n">{percent(lane.used)}</span>
      </td>
      <td class="n">{duration(lane.oldest_wait)}</td>
      {steer && (
        <td class="actions">
          {lane.lane !== null &&
            (lane.paused ? (
              <Action label={`Resume ${lane.lane}`} run={() => steer("resume", { lane: lane.lane })}>
                Resume
              </Action>
            ) : (
              <Action label={`Pause ${lane.lane}`} run={() => steer("pause", { lane: lane.lane })}>
                Pause
              </Action>
            ))}
        </td>
      )}
    </tr>
  );
}

function NextUp({ queue, jobs, waiting }: { queue: string; jobs: NextJob[]; waiting: number }) {
  return (
    <ol class="next">
      {jobs.length === 0 && <li class="quiet">{waiting ? "It cannot be estimated which job is next: many lanes take turns, or the waiting ones are paused." : "Nothing waits."}</li>}
      {jobs.map((job, n) => (
        <li key={job.id} data-job={job.id}>
          <span class="place">{n + 1}</span>
          <span class="who">
            {job.lane === null ? (
              <span class="quiet">no lane</span>
            ) : (
              <a href={laneHref(queue, job.lane)}>
                <Text most={40}>{job.lane}</Text>
              </a>
            )}{" "}
            <Class of={job.priority} />
          </span>
          <span class="eta" title={job.why}>
            {job.eta === null ? "?" : duration(job.eta)}
          </span>
          <span class="task">
            <JobLink id={job.id}>
              <Text most={60}>{job.task}</Text>
            </JobLink>
          </span>
          <span class="quiet waits">
            waits <Since at={job.enqueued_at} />
          </span>
        </li>
      ))}
    </ol>
  );
}

/** Ask for a limit in a dialog. */
export function LimitButton({ title, limit, set, clear }: { title: string; limit: number | null; set: (limit: number | null) => Promise<unknown>; clear: (() => Promise<unknown>) | null }) {
  const [open, setOpen] = useState(false);
  const [text, setText] = useState("");
  const [error, setError] = useState<string | null>(null);
  const change = (made: Promise<unknown>) =>
    made.then(
      () => setOpen(false),
      (problem) => setError(String(problem.message ?? problem)),
    );
  return (
    <>
      <button
        type="button"
        onClick={() => {
          setText(limit === null ? "" : String(limit));
          setError(null);
          setOpen(true);
        }}
      >
        Limit …
      </button>
      {open && (
        <Dialog title={title} close={() => setOpen(false)}>
          <form
            onSubmit={(event) => {
              event.preventDefault();
              void change(set(text.trim() === "" ? null : Number(text)));
            }}
          >
            <label>
              Jobs that may run at once
              <input type="number" min="1" inputMode="numeric" value={text} onInput={(event) => setText(event.currentTarget.value)} placeholder="no limit" />
            </label>
            <p class="quiet">Running jobs continue. Leave it empty for no limit.</p>
            {error && (
              <p class="problem" role="alert">
                {visible(error)}
              </p>
            )}
            <div class="buttons">
              <button type="submit" class="main">
                Set the limit
              </button>
              {clear && (
                <button type="button" onClick={() => void change(clear())}>
                  Back to the declared one
                </button>
              )}
              <button type="button" onClick={() => setOpen(false)}>
                Close
              </button>
            </div>
          </form>
        </Dialog>
      )}
    </>
  );
}
