import { useEffect, useState } from "preact/hooks";

import { query } from "../api";
import { plural } from "../format";
import { useData, useStream } from "../live";
import { Class, Empty, JobLink, LaneLink, Loading, Pill, Problem, queueHref, Table, Text, Time } from "../parts";
import type { Found, JobSummary } from "../types";

export function Search({ text }: { text: string }) {
  const [draft, setDraft] = useState(text);
  useEffect(() => setDraft(text), [text]);
  const found = useData<Found>(text ? `/search${query({ q: text })}` : null, 3);
  useStream("/events", ["queues"], () => undefined);
  return (
    <>
      <h1>Search</h1>
      <form
        role="search"
        class="search-form"
        onSubmit={(event) => {
          event.preventDefault();
          location.hash = `#/search?q=${encodeURIComponent(draft.trim())}`;
        }}
      >
        <label>
          <span class="sr">Id, task, lane, sticky key or worker</span>
          <input type="search" value={draft} onInput={(event) => setDraft(event.currentTarget.value)} placeholder="Id, task, lane, sticky key or worker" />
        </label>
        <button type="submit" class="main">
          Search
        </button>
      </form>
      <Problem error={found.error} />
      {!text ? (
        <Empty title="Look for a job" command="fairlane jobs --task NAME">
          By its id, or by the exact name of its task, lane, sticky key or worker. Queues and tasks are found by a part of their name.
        </Empty>
      ) : found.data === null ? (
        found.error ? null : <Loading />
      ) : (
        <Results found={found.data} />
      )}
    </>
  );
}

/** Jobs that a search returns for each way to match. */
const MOST = 10;

function Results({ found }: { found: Found }) {
  const nothing = !found.jobs.length && !found.queues.length && !found.lanes.length && !found.tasks.length && !found.bindings.length;
  if (nothing) return <Empty title="Nothing has this name">Ids, lanes, keys and workers must match exactly. Finished jobs are kept for a limited time.</Empty>;
  return (
    <>
      {(found.queues.length > 0 || found.lanes.length > 0 || found.tasks.length > 0) && (
        <ul class="plain found">
          {found.queues.map((name) => (
            <li key={`q${name}`}>
              <span class="quiet">queue</span>{" "}
              <a href={queueHref(name)}>
                <Text>{name}</Text>
              </a>
            </li>
          ))}
          {found.lanes.map((each) => (
            <li key={`l${each.queue}/${each.lane}`}>
              <span class="quiet">lane of {each.queue}</span> <LaneLink queue={each.queue} lane={each.lane} />
            </li>
          ))}
          {found.tasks.map((name) => (
            <li key={`t${name}`}>
              <span class="quiet">task</span>{" "}
              <a href={`#/search?q=${encodeURIComponent(name)}`}>
                <Text>{name}</Text>
              </a>
            </li>
          ))}
        </ul>
      )}
      {found.bindings.length > 0 && (
        <ul class="plain found">
          {found.bindings.map((each) => (
            <li key={`${each.pool}${each.key}${each.opened_at}`}>
              <span class="quiet">sticky key</span> <Text>{each.key}</Text> <Pill state={each.state} />{" "}
              <a href="#/workers">
                {each.pool}/{each.index}
              </a>
            </li>
          ))}
        </ul>
      )}
      {found.jobs.length > 0 && (
        <>
          <h2>
            {plural(found.jobs.length, "job")}{" "}
            <span class="quiet">
              by {found.by.join(", ")}, newest first{found.jobs.length >= MOST && `; at most ${MOST} are shown for each`}
            </span>
          </h2>
          <JobTable jobs={found.jobs} />
        </>
      )}
      {!found.complete && <p class="quiet">There are more queues than were searched for this lane.</p>}
    </>
  );
}

function JobTable({ jobs }: { jobs: JobSummary[] }) {
  return (
    <Table
      caption="Jobs"
      class="frame jobs"
      head={
        <>
          <th scope="col">Job</th>
          <th scope="col">Task</th>
          <th scope="col">State</th>
          <th scope="col">Queue</th>
          <th scope="col">Lane</th>
          <th scope="col">Sent</th>
          <th scope="col">Worker</th>
        </>
      }
    >
      {jobs.map((job) => (
        <tr key={job.id} data-job={job.id}>
          <th scope="row">
            <JobLink id={job.id} />
          </th>
          <td>
            <Text most={60}>{job.task}</Text> <Class of={job.priority} />
          </td>
          <td>
            <Pill state={job.state} />
          </td>
          <td>
            <a href={queueHref(job.queue)}>
              <Text most={40}>{job.queue}</Text>
            </a>
          </td>
          <td>
            <LaneLink queue={job.queue} lane={job.lane} />
          </td>
          <td>
            <Time at={job.enqueued_at} />
          </td>
          <td>{job.worker ?? <span class="quiet">–</span>}</td>
        </tr>
      ))}
    </Table>
  );
}
