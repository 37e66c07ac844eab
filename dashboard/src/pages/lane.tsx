import { useRef, useState } from "preact/hooks";

import { part, post, query, request } from "../api";
import { BulkButton } from "../bulk";
import { duration, number, shell } from "../format";
import { useData, useRefusal, useStream } from "../live";
import { Action, Class, Empty, Fact, JobLink, Loading, Pill, Problem, queueHref, Since, Table, Text, useHand, useMay } from "../parts";
import type { LineEvent, QueueDetail } from "../types";
import { LimitButton } from "./queue";

export function LanePage({ queue, lane }: { queue: string; lane: string | null }) {
  const [event, setEvent] = useState<LineEvent | null>(null);
  const detail = useData<QueueDetail>(`/queues/${part(queue)}`);
  useStream(detail.error?.status === 404 ? null : `/queues/${part(queue)}/line/events${query({ lane })}`, ["line"], (_, data) => setEvent(data as LineEvent));
  const refusal = useRefusal();
  const operate = useMay("operate");
  const steer = (verb: string) => post(`/queues/${part(queue)}/${verb}`, { lane }).then(detail.again);
  const terms = event?.terms;
  return (
    <>
      <header class="head">
        <p class="crumbs">
          <a href="#/">Overview</a> /{" "}
          <a href={queueHref(queue)}>
            <Text most={60}>{queue}</Text>
          </a>{" "}
          / lane
        </p>
        <h1>
          {lane === null ? "Jobs without a lane" : <Text>{lane}</Text>} {terms?.paused && <span class="pill paused">paused</span>}
        </h1>
        {operate && lane !== null && terms && (
          <div class="actions">
            {terms.paused ? <Action run={() => steer("resume")}>Resume</Action> : <Action run={() => steer("pause")}>Pause</Action>}
            <LimitButton title={`Limit of ${lane}`} limit={terms.own_limit} set={(limit) => request("PUT", `/queues/${part(queue)}/limit`, { limit, lane }).then(detail.again)} clear={() => steer("clear-limit")} />
            <BulkButton verb="cancel" selection={{ queue, lane }} title="Cancel the jobs of this lane" done={() => undefined}>
              Cancel all …
            </BulkButton>
          </div>
        )}
      </header>
      <Problem error={detail.error?.status === 404 ? detail.error : refusal} />
      {event !== null ? <Line event={event} /> : detail.error?.status === 404 || refusal ? null : <Loading />}
    </>
  );
}

function Line({ event }: { event: LineEvent }) {
  const [held, hand] = useHand();
  const shown = useRef(event);
  if (!held) shown.current = event;
  const { jobs, more, exact } = shown.current;
  const { terms, head } = event;
  return (
    <>
      <dl class="facts">
        <Fact name="Waiting">
          <b class="wait">
            {!event.waiting_exact && "≥ "}
            {number(event.waiting)}
          </b>
        </Fact>
        <Fact name="Running">
          <b class="run">{number(event.running)}</b>
          {terms.own_limit !== null && <span class="quiet"> of {number(terms.own_limit)}</span>}
        </Fact>
        <Fact name="Weight">{terms.weight}</Fact>
        <Fact name="Order">{event.ordered ? "strictly by arrival" : "by priority, then arrival"}</Fact>
        {terms.max_pending !== null && <Fact name="At most waiting">{number(terms.max_pending)}</Fact>}
      </dl>
      {head && (
        <p class="why" role="status">
          <b>The first in line waits:</b> <Text>{head.why}</Text>
        </p>
      )}
      {jobs.length === 0 ? (
        <Empty title="No job is in line" command={`fairlane jobs --queue ${shell(event.queue)}${event.lane === null ? "" : ` --lane=${shell(event.lane)}`}`}>
          This lane has no running or waiting job. Its finished jobs are listed by the command below.
        </Empty>
      ) : (
        <Table
          caption="The line: running jobs, then waiting jobs by place"
          {...hand}
          head={
            <>
              <th scope="col" class="n">Place</th>
              <th scope="col">Job</th>
              <th scope="col">Task and arguments</th>
              <th scope="col">State</th>
              <th scope="col" class="n">In line for</th>
              <th scope="col" class="n">Starts in about</th>
            </>
          }
        >
          {jobs.map((job) => (
            <tr key={job.id} data-job={job.id} class={job.state === "running" ? "now" : ""}>
              <td class="n place">{job.place ?? "▶"}</td>
              <th scope="row">
                <JobLink id={job.id} />
              </th>
              <td>
                <Text most={60}>{job.task}</Text> <Class of={job.priority} />{" "}
                {job.arguments && (
                  <span class="arguments">
                    <Text most={80}>{job.arguments}</Text>
                  </span>
                )}
              </td>
              <td>
                <Pill state={job.state} /> {job.attempt > 1 && <span class="quiet">attempt {job.attempt}</span>}
              </td>
              <td class="n">
                <Since at={job.enqueued_at} />
              </td>
              <td class="n">
                {job.started_at !== null ? (
                  <span class="run">
                    runs for <Since at={job.started_at} />
                  </span>
                ) : (
                  duration(job.eta)
                )}
              </td>
            </tr>
          ))}
        </Table>
      )}
      <p class="quiet" role="status">
        {held ? "The list is held still while you point at it." : more ? `The first ${number(jobs.length)} are shown.` : ""}
        {!exact && " Some jobs may be missing."}
      </p>
    </>
  );
}
