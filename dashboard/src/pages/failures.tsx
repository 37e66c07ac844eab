import { BulkButton } from "../bulk";
import { Spark } from "../chart";
import { number } from "../format";
import { useData, useStream } from "../live";
import { Empty, JobLink, Loading, Problem, Table, Text, Time, useMay } from "../parts";
import type { Failure, Timeline } from "../types";

export function Failures() {
  // Each is read again 5 s after its answer, however often jobs fail: it takes some thousands of rows.
  const failures = useData<{ failures: Failure[] }>("/failures", 5);
  const timeline = useData<Timeline>("/failures/timeline", 5);
  useStream("/events", ["queues"], () => undefined);
  const operate = useMay("operate");
  const groups = failures.data?.failures ?? null;
  const over = new Map(timeline.data?.groups.map((group) => [`${group.task}\n${group.error_group}`, group.counts]));
  return (
    <>
      <h1>Failures</h1>
      <Problem error={failures.error} again={failures.again} />
      {groups === null ? (
        failures.error ? null : <Loading />
      ) : groups.length === 0 ? (
        <Empty title="No failed job is kept" command="fairlane jobs --state failed">
          Jobs that failed after their last retry appear here, grouped by their error.
        </Empty>
      ) : (
        <Table
          caption="Failed jobs, grouped by task and error"
          head={
            <>
              <th scope="col" class="n">Jobs</th>
              <th scope="col">Error</th>
              <th scope="col" class="spark-cell">
                Over time{" "}
                {timeline.data && (
                  <span class="quiet">
                    since <Time at={timeline.data.from} />
                  </span>
                )}
              </th>
              <th scope="col">Last</th>
              <th scope="col">Example</th>
              {operate && (
                <th scope="col">
                  <span class="sr">Actions</span>
                </th>
              )}
            </>
          }
        >
          {groups.map((group) => (
            <tr key={`${group.task}\n${group.error_group}`} data-group={group.error_group}>
              <td class="n bad">
                {!group.exact && "≥ "}
                {number(group.count)}
              </td>
              <th scope="row" class="wide">
                <Text most={80}>{group.task}</Text> <span class="quiet">{group.reason === "error" ? "" : group.reason}</span>
                <span class="error-line">
                  <Text most={160}>{group.error_line ?? group.error_group}</Text>
                </span>
              </th>
              <td class="spark-cell">
                <Spark counts={over.get(`${group.task}\n${group.error_group}`) ?? []} label={`${group.count} failures over time`} />
              </td>
              <td>
                <Time at={group.last_at} />
              </td>
              <td>
                <JobLink id={group.example_id}>open</JobLink>
              </td>
              {operate && (
                <td class="actions">
                  <BulkButton verb="retry" selection={{ state: "failed", task: group.task, error_group: group.error_group }} title={`Run ${group.task} again`} done={failures.again}>
                    Run again …
                  </BulkButton>
                  <BulkButton verb="cancel" selection={{ task: group.task }} title={`Cancel what is left of ${group.task}`} done={failures.again}>
                    Cancel the rest …
                  </BulkButton>
                </td>
              )}
            </tr>
          ))}
        </Table>
      )}
      {timeline.data && !timeline.data.exact && <p class="quiet">The bars count the newest 300 failures.</p>}
    </>
  );
}
