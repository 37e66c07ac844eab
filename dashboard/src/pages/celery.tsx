import { number } from "../format";
import { useData, useStream } from "../live";
import { Empty, Loading, Problem, Table, Text, tone } from "../parts";

interface Loads {
  queues: Record<string, { pending: number; running: number }>;
}

export function CeleryPage() {
  const read = useData<Loads>("/celery", 1);
  useStream("/events", ["queues"], () => undefined);
  const loads = read.data ? Object.entries(read.data.queues) : null;
  const longest = Math.max(1, ...(loads ?? []).map(([, load]) => load.pending + load.running));
  return (
    <>
      <h1>
        Celery <span class="quiet">loads of the balanced queues</span>
      </h1>
      <Problem error={read.error} again={read.again} />
      {loads === null ? (
        read.error ? null : <Loading />
      ) : loads.length === 0 ? (
        <Empty title="The load balancer has no queue" command="fairlane celery doctor -A module:app" />
      ) : (
        <Table
          caption="Balanced queues with their waiting and running tasks"
          head={
            <>
              <th scope="col">Queue</th>
              <th scope="col" class="bar-cell">Running, waiting</th>
              <th scope="col" class="n">Waiting</th>
              <th scope="col" class="n">Running</th>
            </>
          }
        >
          {loads.map(([name, load]) => (
            <tr key={name} data-queue={name}>
              <th scope="row">
                <Text most={60}>{name}</Text>
              </th>
              <td class="bar-cell">
                <span class="bar" role="img" aria-label={`${load.running} running, ${load.pending} waiting`}>
                  {load.running > 0 && <i class="run normal" style={{ width: `${(load.running / longest) * 100}%` }} />}
                  {load.pending > 0 && <i class="wait normal" style={{ width: `${(load.pending / longest) * 100}%` }} />}
                </span>
              </td>
              <td class={tone("wait", load.pending)}>{number(load.pending)}</td>
              <td class={tone("run", load.running)}>{number(load.running)}</td>
            </tr>
          ))}
        </Table>
      )}
    </>
  );
}
