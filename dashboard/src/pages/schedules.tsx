import { part, post } from "../api";
import { duration } from "../format";
import { useData, useStream } from "../live";
import { Action, Empty, JobLink, Loading, Problem, Table, Text, Time, useMay } from "../parts";
import type { Schedule } from "../types";

const timetable = (each: Schedule): string =>
  each.timetable.every !== undefined ? `every ${duration(each.timetable.every)}` : `${each.timetable.cron} ${each.timetable.timezone ?? "UTC"}`;

export function Schedules() {
  const read = useData<{ schedules: Schedule[] }>("/schedules", 2);
  useStream("/events", ["queues"], () => undefined);
  const operate = useMay("operate");
  const all = read.data?.schedules ?? null;
  return (
    <>
      <h1>Schedules</h1>
      <Problem error={read.error} again={read.again} />
      {all === null ? (
        read.error ? null : <Loading />
      ) : all.length === 0 ? (
        <Empty title="Nothing is scheduled" command='@app.task(cron="0 4 * * *")'>
          A task with a timetable appears here when a worker that has it starts.
        </Empty>
      ) : (
        <Table
          caption="Schedules with their last and next runs"
          head={
            <>
              <th scope="col">Schedule</th>
              <th scope="col">Timetable</th>
              <th scope="col">Last run</th>
              <th scope="col">Next run</th>
              {operate && (
                <th scope="col">
                  <span class="sr">Actions</span>
                </th>
              )}
            </>
          }
        >
          {all.map((each) => (
            <tr key={each.name} data-schedule={each.name}>
              <th scope="row">
                <Text most={80}>{each.name}</Text> {each.stopped ? <span class="pill dead">stopped</span> : !each.live && <span class="pill lost">no worker declares it</span>}
              </th>
              <td class="tabular">{timetable(each)}</td>
              <td>{each.last_job === null ? <span class="quiet">never</span> : <JobLink id={each.last_job}><Time at={each.last} /></JobLink>}</td>
              <td>
                <Time at={each.next} none="none" />
              </td>
              {operate && (
                <td class="actions">
                  <Action
                    label={`Run now: ${each.name}`}
                    run={async () => {
                      const sent = await post<{ id: string }>(`/schedules/${part(each.name)}/run`);
                      location.hash = `#/jobs/${encodeURIComponent(sent.id)}`;
                    }}
                  >
                    Run now
                  </Action>
                </td>
              )}
            </tr>
          ))}
        </Table>
      )}
    </>
  );
}
