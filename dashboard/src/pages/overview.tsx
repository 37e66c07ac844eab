import { useState } from "preact/hooks";

import { Throughput } from "../chart";
import { clock, duration, number, plural, rate } from "../format";
import { useData, useRefusal, useStream } from "../live";
import { Empty, Loading, Problem, queueHref, Slots, Table, Text, tone } from "../parts";
import type { Finding, History, Queue, QueuesEvent, Session, WorkersEvent } from "../types";
import { PRIORITIES } from "../types";

export function Overview({ session, theme }: { session: Session; theme: string }) {
  const [queues, setQueues] = useState<Queue[] | null>(null);
  const [workers, setWorkers] = useState<WorkersEvent | null>(null);
  const polled = useData<{ queues: Queue[] }>(session.bound ? "/queues" : null, 2);
  const history = useData<History>(session.bound ? null : "/history", 10);
  const doctor = useData<{ at: number; findings: Finding[] }>(session.bound ? null : "/doctor", 10);
  useStream(session.bound ? null : "/events", ["queues", "workers"], (kind, data) => {
    if (kind === "queues") setQueues((data as QueuesEvent).queues);
    else setWorkers(data as WorkersEvent);
  });
  const refusal = useRefusal();
  const all = session.bound ? (polled.data?.queues ?? null) : queues;
  return (
    <>
      <h1 class="sr">Overview</h1>
      {session.features.includes("story") && <Story />}
      <Figures queues={all} history={history.data} />
      {!session.bound && <Findings findings={doctor.data?.findings ?? null} />}
      <Problem error={refusal ?? history.error ?? polled.error} />
      <section aria-labelledby="queues-title">
        <h2 id="queues-title">Queues</h2>
        {all === null ? <Loading /> : session.lane_prefix !== null ? <Bound prefix={session.lane_prefix} /> : <Queues queues={all} />}
      </section>
      {!session.bound && (
        <div class="columns">
          <section aria-labelledby="hour-title">
            <h2 id="hour-title">
              Last hour <span class="quiet">jobs ended per second</span>
            </h2>
            {history.data && <Throughput history={history.data} theme={theme} />}
            <p class="legend">
              <span class="key done">completed</span> <span class="key bad">failed</span>
              {history.data && begun(history.data) && <span class="quiet"> counted since {begun(history.data)}</span>}
            </p>
          </section>
          <section aria-labelledby="workers-title">
            <h2 id="workers-title">
              Workers <span class="quiet">{leaderText(workers)}</span>
            </h2>
            {workers === null ? <Loading /> : <Fleet event={workers} />}
          </section>
        </div>
      )}
    </>
  );
}

/** When the counts of the last hour begin, unless they are of a whole hour. */
const begun = (history: History): string | undefined => (history.since !== null && history.at.length < 350 ? clock(history.since) : undefined);

function leaderText(event: WorkersEvent | null): string {
  if (!event) return "";
  if (!event.leader) return "no leader";
  return `${event.leader.name ?? event.leader.session} leads, term ${event.leader.term}`;
}

function Figure({ name, value, note, tone = "" }: { name: string; value: string; note?: string; tone?: string }) {
  return (
    <div class={`figure ${tone}`}>
      <dt>{name}</dt>
      <dd>
        {value}
        {note && <small>{note}</small>}
      </dd>
    </div>
  );
}

function Figures({ queues, history }: { queues: Queue[] | null; history: History | null }) {
  const sum = (read: (queue: Queue) => number | null | undefined) => (queues ?? []).reduce((total, queue) => total + (read(queue) ?? 0), 0);
  const oldest = (queues ?? []).reduce<number | null>((most, queue) => (queue.oldest_wait === null ? most : Math.max(most ?? 0, queue.oldest_wait)), null);
  const ended = queues?.some((queue) => queue.ended_per_second != null) ? sum((queue) => queue.ended_per_second) : null;
  const failed = history ? history.failed.reduce((total, each) => total + each, 0) : null;
  const waits = history?.waits.all;
  return (
    <dl class="figures">
      <Figure name="Waiting" value={queues ? number(sum((queue) => queue.pending)) : "–"} note={queues && sum((q) => q.scheduled) ? `${number(sum((q) => q.scheduled))} for later` : undefined} tone="wait" />
      <Figure name="Running" value={queues ? number(sum((queue) => queue.running)) : "–"} tone="run" />
      <Figure name="Ended per second" value={rate(ended)} tone="done" />
      <Figure name="Oldest wait" value={duration(oldest)} />
      <Figure name="Time to start" value={duration(waits?.p50)} note={waits?.p95 != null ? `p95 ${duration(waits.p95)}` : undefined} />
      <Figure name="Failed, last hour" value={failed === null ? "–" : number(failed)} note={history && begun(history) ? `since ${begun(history)}` : undefined} tone={failed ? "bad" : ""} />
    </dl>
  );
}

function Bound({ prefix }: { prefix: string }) {
  return (
    <Empty title="Your token is for lanes, not for whole queues">
      It sees the lanes <Text>{prefix}</Text> and their jobs: open the link of a job or of a lane.
    </Empty>
  );
}

function Queues({ queues }: { queues: Queue[] }) {
  if (!queues.length) {
    return (
      <Empty title="No queue has a job yet" command="fairlane enqueue -A module:app TASK ARGUMENT">
        A queue appears here with its first job, or when a worker declares it.
      </Empty>
    );
  }
  const longest = Math.max(1, ...queues.map((queue) => queue.pending + queue.running));
  return (
    <Table
      caption="Queues with their waiting and running jobs"
      head={
        <>
          <th scope="col">Queue</th>
          <th scope="col" class="bar-cell">
            Waiting and running, by class
          </th>
          <th scope="col" class="n">Waiting</th>
          <th scope="col" class="n">Running</th>
          <th scope="col" class="n">Oldest</th>
          <th scope="col" class="n">Ended/s</th>
          <th scope="col" class="n">Failed</th>
          <th scope="col" class="n">Workers</th>
        </>
      }
    >
      {queues.map((queue) => (
        <tr key={queue.name} data-queue={queue.name}>
          <th scope="row">
            <a href={queueHref(queue.name)}>
              <Text most={60}>{queue.name}</Text>
            </a>{" "}
            {queue.paused && <span class="pill paused">paused</span>}
            {queue.limit !== null && <span class="quiet"> limit {queue.limit}</span>}
          </th>
          <td class="bar-cell">
            <ClassBar queue={queue} longest={longest} />
          </td>
          <td class={tone("wait", queue.pending)}>{number(queue.pending)}</td>
          <td class={tone("run", queue.running)}>{number(queue.running)}</td>
          <td class="n">{duration(queue.oldest_wait)}</td>
          <td class="n">{rate(queue.ended_per_second)}</td>
          <td class={tone("bad", queue.failed)}>{number(queue.failed)}</td>
          <td class={queue.workers || !queue.pending ? "n" : "n bad"}>{number(queue.workers)}</td>
        </tr>
      ))}
    </Table>
  );
}

function ClassBar({ queue, longest }: { queue: Queue; longest: number }) {
  const parts = PRIORITIES.flatMap((name) => [
    { kind: `run ${name}`, count: queue.classes[name].running, word: `${name}: ${queue.classes[name].running} running` },
    { kind: `wait ${name}`, count: queue.classes[name].pending, word: `${name}: ${queue.classes[name].pending} waiting` },
  ]).filter((each) => each.count);
  const label = parts.map((each) => each.word).join(", ") || "empty";
  return (
    <span class="bar" role="img" aria-label={label} title={label}>
      {parts.map((each) => (
        <i key={each.kind} class={each.kind} style={{ width: `max(2px, ${(each.count / longest) * 100}%)` }} />
      ))}
    </span>
  );
}

function Fleet({ event }: { event: WorkersEvent }) {
  if (!event.workers.length) {
    return (
      <Empty title="No worker is running" command="fairlane worker -A module:app">
        Jobs wait until one starts.
      </Empty>
    );
  }
  return (
    <>
      <ul class="fleet">
        {event.workers.map((worker) => (
          <li key={worker.id} data-worker={worker.worker}>
            <a href="#/workers">
              <Text most={40}>{worker.worker ?? worker.host}</Text>
            </a>
            <Slots worker={worker} />
            <span class="n quiet">
              {worker.running}/{worker.slots?.total ?? 0}
            </span>
            {worker.late && <span class="pill dead">silent</span>}
            {worker.state === "stopping" && <span class="pill stopping">stopping</span>}
          </li>
        ))}
      </ul>
      {event.total > event.workers.length && <p class="quiet">and {number(event.total - event.workers.length)} more</p>}
      <p class="legend">
        <span class="key run high">high</span> <span class="key run normal">normal</span> <span class="key run low">low</span> <span class="key free">free</span>{" "}
        <span class="key kept high">reserved for high</span>
      </p>
    </>
  );
}

function Findings({ findings }: { findings: Finding[] | null }) {
  if (findings === null) return <p class="findings quiet">Checking the system …</p>;
  const trouble = findings.filter((finding) => finding.level !== "ok");
  if (!trouble.length) {
    return (
      <p class="findings ok">
        <span class="dot ok" aria-hidden="true" /> Nothing needs attention. <span class="quiet">{plural(findings.length, "check")} by the doctor.</span>
      </p>
    );
  }
  return (
    <ul class="findings" aria-label="What needs attention">
      {trouble.map((finding) => (
        <li key={finding.topic + finding.what} class={finding.level}>
          <span class={`dot ${finding.level}`} aria-hidden="true" />
          <span>
            <span class="sr">{finding.level === "error" ? "Error: " : "Warning: "}</span>
            <b>{finding.topic}</b> <Text most={400}>{finding.what}</Text>
            {finding.advice && (
              <span class="advice">
                {" "}
                <Text most={400}>{finding.advice}</Text>
              </span>
            )}
          </span>
        </li>
      ))}
    </ul>
  );
}

function Story() {
  const story = useData<{ round: number; sentences: { at: number; text: string }[] }>("/story", 1);
  const said = story.data?.sentences ?? [];
  return (
    <section class="story" aria-labelledby="story-title">
      <h2 id="story-title">
        The demo {story.data && <span class="quiet">round {Math.max(1, story.data.round)}</span>}
      </h2>
      <ol aria-live="polite">
        {said.slice(-4).map((each) => (
          <li key={each.at}>{each.text}</li>
        ))}
      </ol>
    </section>
  );
}
