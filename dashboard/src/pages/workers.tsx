import { useState } from "preact/hooks";

import { get, post } from "../api";
import { number, plural } from "../format";
import { useData, useStream } from "../live";
import { Action, Empty, Fact, Loading, Pill, Problem, Slots, Table, Text, Time, useMay } from "../parts";
import type { Binding, Worker, WorkersEvent } from "../types";

const OPEN = ["open", "draining"];
const MOST_KEYS = 500;
const KEYS = `/bindings?limit=${MOST_KEYS}`;
const workerOf = (each: Binding): string => `${each.pool}/${each.index}`;

export function Workers() {
  const [event, setEvent] = useState<WorkersEvent | null>(null);
  const gone = useData<{ workers: Worker[] }>("/workers?kind=worker&state=dead", 5);
  const bindings = useData<{ bindings: Binding[] }>(KEYS, 2);
  useStream("/events", ["queues", "workers"], (kind, data) => {
    if (kind === "workers") setEvent(data as WorkersEvent);
  });
  const operate = useMay("operate");
  const keys = new Map<string, Binding[]>();
  for (const each of bindings.data?.bindings ?? []) {
    if (!OPEN.includes(each.state)) continue;
    const name = workerOf(each);
    keys.set(name, [...(keys.get(name) ?? []), each]);
  }
  const present = event?.workers ?? [];
  const names = new Set(present.map((worker) => worker.worker));
  // Only a token for the whole system sees all workers, and so which one is missing.
  const orphans = event && event.total === present.length ? [...keys].filter(([name]) => !names.has(name)) : [];
  const partial = (bindings.data?.bindings.length ?? 0) >= MOST_KEYS;
  const release = (binding: Binding) => post("/bindings:release", { key: binding.key, pool: binding.pool });
  const releaseAll = async (worker: string) => {
    const tried = new Set<string>();
    const refused: string[] = [];
    for (;;) {
      // A released key makes room for others on the page.
      const page = await get<{ bindings: Binding[] }>(KEYS);
      const held = page.bindings.filter((each) => each.state === "open" && workerOf(each) === worker && !tried.has(each.key));
      if (!held.length) break;
      for (const each of held) {
        tried.add(each.key);
        await release(each).catch((problem) => void refused.push(String(problem.message ?? problem)));
      }
    }
    bindings.again();
    if (refused.length) throw new Error(`${number(refused.length)} of ${plural(tried.size, "key")} not released: ${refused[0]}`);
  };
  const closed = (bindings.data?.bindings ?? []).filter((each) => !OPEN.includes(each.state));
  return (
    <>
      <h1>
        Workers <span class="quiet">{event && (event.leader ? `${event.leader.name ?? event.leader.session} leads, term ${event.leader.term}` : "no leader")}</span>
      </h1>
      <Problem error={bindings.error} again={bindings.again} />
      {event === null ? (
        bindings.error ? null : <Loading />
      ) : present.length === 0 ? (
        <Empty title="No worker is running" command="fairlane worker -A module:app">
          Jobs wait until one starts.
        </Empty>
      ) : (
        <ul class="cards">
          {present.map((worker) => (
            <li key={worker.id} class="card" data-worker={worker.worker}>
              <h2>
                <Text most={60}>{worker.worker ?? worker.host}</Text> {worker.late ? <span class="pill dead">silent</span> : <Pill state={worker.state} />}
                {event.leader?.session === worker.id && <span class="pill leads">leads</span>}
              </h2>
              <Slots worker={worker} />
              <p class="quiet">
                {worker.running} of {worker.slots?.total ?? 0} running · {worker.queues.length ? worker.queues.join(", ") : "no queue"}
              </p>
              <p class="quiet">
                <Text most={60}>{worker.host}</Text>, pid {worker.pid}, started <Time at={worker.started_at} /> ·{" "}
                <a href={`#/search?q=${encodeURIComponent(worker.worker ?? "")}`}>its jobs</a>
              </p>
              <Keys held={keys.get(worker.worker ?? "") ?? []} partial={partial} operate={operate} release={(each) => release(each).then(bindings.again)} drain={() => releaseAll(worker.worker ?? "")} />
            </li>
          ))}
        </ul>
      )}
      {event && event.total > present.length && <p class="quiet">and {number(event.total - present.length)} more</p>}
      {orphans.map(([name, held]) => (
        <section key={name} class="card gone" data-worker={name}>
          <h2>
            <Text>{name}</Text> <span class="pill dead">not running</span>
          </h2>
          <p>Its keys are bound to another worker once its lease is over.</p>
          <Keys held={held} partial={partial} operate={operate} release={(each) => release(each).then(bindings.again)} drain={() => releaseAll(name)} />
        </section>
      ))}
      <Tokens />
      {(gone.data?.workers.length ?? 0) > 0 && (
        <section aria-labelledby="dead-title">
          <h2 id="dead-title">
            Dead <span class="quiet">their leases expired; their jobs were rescued</span>
          </h2>
          <ul class="plain">
            {gone.data!.workers.slice(0, 20).map((worker) => (
              <li key={worker.id} data-dead={worker.worker}>
                <Text most={60}>{worker.worker ?? worker.kind}</Text> <Pill state="dead" />{" "}
                <span class="quiet">
                  pid {worker.pid} on <Text most={60}>{worker.host}</Text>, started <Time at={worker.started_at} />
                </span>
              </li>
            ))}
          </ul>
        </section>
      )}
      {bindings.data && bindings.data.bindings.length === 0 && (
        <section aria-labelledby="keys-title">
          <h2 id="keys-title">Sticky keys</h2>
          <Empty title="No key is bound" command='render.options(sticky="plan-7").enqueue(…)'>
            A job with a sticky key binds the key to one worker, until it is released.
          </Empty>
        </section>
      )}
      {closed.length > 0 && (
        <section aria-labelledby="closed-title">
          <h2 id="closed-title">
            Keys that were bound <span class="quiet">the latest {number(Math.min(50, closed.length))}</span>
          </h2>
          <Table
            caption="Closed bindings"
            head={
              <>
                <th scope="col">Key</th>
                <th scope="col">Worker</th>
                <th scope="col">State</th>
                <th scope="col">Closed</th>
              </>
            }
          >
            {closed.slice(0, 50).map((each) => (
              <tr key={`${each.pool}/${each.key}/${each.opened_at}`}>
                <th scope="row">
                  <Text most={80}>{each.key}</Text>
                </th>
                <td>
                  {each.pool}/{each.index}
                </td>
                <td>
                  <Pill state={each.state} /> {each.cleanup_failed && <span class="bad">clean-up failed</span>}
                </td>
                <td>
                  <Time at={each.closed_at} />
                </td>
              </tr>
            ))}
          </Table>
        </section>
      )}
    </>
  );
}

const TOKENS = ["pushed", "failed", "scanned", "trimmed"] as const;

/** What became of the tokens that wake workers; only on PostgreSQL with Redis. */
function Tokens() {
  const counters = useData<{ counters: Record<string, number> }>("/counters", 5).data?.counters ?? {};
  if (counters.tokens_pushed === undefined) return null;
  const down = counters.redis_down ?? 0;
  return (
    <section aria-labelledby="tokens-title">
      <h2 id="tokens-title">
        Tokens in Redis{" "}
        {down > 0 ? <span class="bad">{down} Redis down: workers poll PostgreSQL for its priorities</span> : <span class="quiet">each wakes one worker for a job in PostgreSQL</span>}
      </h2>
      <dl class="facts">
        {TOKENS.map((name) => (
          <Fact key={name} name={name[0].toUpperCase() + name.slice(1)}>
            <span data-tokens={name}>{number(counters[`tokens_${name}`] ?? 0)}</span>
          </Fact>
        ))}
      </dl>
    </section>
  );
}

const SHOWN = 20;

function Keys({ held, partial, operate, release, drain }: { held: Binding[]; partial: boolean; operate: boolean; release: (each: Binding) => Promise<unknown>; drain: () => Promise<unknown> }) {
  if (!held.length) return null;
  return (
    <div class="keys">
      <h3>
        {partial && "at least "}
        {plural(held.length, "sticky key")}
      </h3>
      <ul class="plain">
        {held.slice(0, SHOWN).map((each) => (
          <li key={each.key} data-key={each.key}>
            <a href={`#/search?q=${encodeURIComponent(each.key)}`}>
              <Text most={60}>{each.key}</Text>
            </a>{" "}
            {each.state === "draining" && <Pill state="draining" />}{" "}
            <span class="quiet">
              used <Time at={each.used_at} />
            </span>
            {operate && each.state === "open" && (
              <Action label={`Release ${each.key}`} run={() => release(each)}>
                Release
              </Action>
            )}
          </li>
        ))}
      </ul>
      {held.length > SHOWN && <p class="quiet">and {number(held.length - SHOWN)} more</p>}
      {operate && <Action run={drain}>Drain: release all</Action>}
    </div>
  );
}
