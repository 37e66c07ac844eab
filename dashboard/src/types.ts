// The documents of the API, as docs/http.md and OpenAPI describe them.

export type State = "scheduled" | "pending" | "running" | "completed" | "failed" | "cancelled";
export type Priority = "high" | "normal" | "low";
export const PRIORITIES: Priority[] = ["high", "normal", "low"];

export interface Counts {
  scheduled: number;
  pending: number;
  running: number;
  completed: number;
  failed: number;
  cancelled: number;
}

export interface Queue extends Counts {
  name: string;
  workers: number;
  oldest_wait: number | null;
  paused: boolean;
  limit: number | null;
  max_pending: number | null;
  overridden: boolean;
  classes: Record<Priority, Counts>;
  arrived_per_second?: number | null;
  ended_per_second?: number | null;
}

export interface LaneRule {
  pattern: string;
  limit?: number | null;
  weight?: number;
  ordered?: boolean | null;
  max_pending?: number | null;
  paused?: boolean;
}

export interface QueueDetail extends Queue {
  declared: unknown;
  override: unknown;
  lanes: LaneRule[];
}

export interface Lane {
  queue: string;
  lane: string | null;
  pending: number;
  running: number;
  exact: boolean;
  oldest_wait: number | null;
  share: number | null;
  used?: number | null;
  limit: number | null;
  weight: number;
  ordered: boolean;
  max_pending: number | null;
  paused: boolean;
  /** The limit that applies once the lane is resumed; `limit` is 0 while it is paused. */
  own_limit: number | null;
}

export interface NextJob {
  id: string;
  task: string;
  lane: string | null;
  priority: Priority;
  enqueued_at: number;
  why: string;
  eta: number | null;
  ahead: number;
}

export interface LanesEvent {
  store: "up" | "away";
  queue: QueueDetail | null;
  lanes: Lane[];
  cursor: string | null;
  exact: boolean;
  next: NextJob[];
  measured_seconds: number;
}

export interface LineJob {
  id: string;
  task: string;
  state: State;
  priority: Priority;
  enqueued_at: number;
  attempt: number;
  started_at: number | null;
  place: number | null;
  eta: number | null;
  arguments: string | null;
}

export interface LineEvent {
  store: "up" | "away";
  queue: string;
  lane: string | null;
  terms: Pick<Lane, "limit" | "weight" | "ordered" | "max_pending" | "paused" | "own_limit">;
  queue_paused: boolean;
  ordered: boolean;
  jobs: LineJob[];
  more: boolean;
  exact: boolean;
  running: number;
  waiting: number;
  waiting_exact: boolean;
  head: { id: string; why: string; gate: string } | null;
}

export interface Worker {
  id: string;
  kind: "worker" | "manager" | "waiter";
  state: "live" | "stopping" | "ended" | "dead";
  host: string;
  pid: number;
  pool: string;
  index: number | null;
  queues: string[];
  slots: { total: number; reserved?: { high?: number; normal?: number } } | null;
  started_at: number;
  running: number;
  worker: string | null;
  classes: Record<Priority, number>;
  late?: boolean;
  remaining?: number;
}

export interface WorkersEvent {
  store: "up" | "away";
  workers: Worker[];
  total: number;
  leader: { term: number; session: string; name: string | null } | null;
}

export interface QueuesEvent {
  store: "up" | "away";
  queues: Queue[];
}

export interface Attempt {
  fence: number;
  attempt: number;
  worker: string;
  started_at: number;
  ended_at: number | null;
  outcome: string | null;
  state: State | null;
  reason: string | null;
  error: string | null;
}

export interface JobSummary {
  id: string;
  task: string;
  queue: string;
  lane: string | null;
  priority: Priority;
  kind: "job" | "turn" | "broadcast" | "cleanup";
  state: State;
  reason: string | null;
  attempt: number;
  retries: number;
  worker: string | null;
  sticky: string | null;
  enqueued_at: number;
  due_at: number | null;
  expires_at: number | null;
  started_at: number | null;
  finished_at: number | null;
  cancel_requested: boolean;
  error: string | null;
  error_group: string | null;
  retry_of: string | null;
  parent: string | null;
}

export interface Position {
  place: number;
  of: number;
  ahead: number;
  exact: boolean;
  of_exact: boolean;
  eta: number | null;
  queue_ahead: number;
}

export interface Job extends JobSummary {
  /** As the text of its JSON, like progress and result: see exact.ts. */
  payload: string | null;
  progress: string | null;
  result: string | null;
  fence: number;
  unique: string | null;
  pool: string;
  cost: number;
  timeout: number | null;
  suspect: boolean;
  attempts: Attempt[];
  position: Position | null;
  eta: number | null;
  why: string;
}

export interface JobUpdate {
  id: string;
  state: State;
  position: Position | null;
  eta: number | null;
  why: string;
  progress: string | null;
  final: boolean;
  result: string | null;
  error: string | null;
  reason: string | null;
  attempt: number;
  fence: number;
  cancel_requested: boolean;
}

export interface Failure {
  task: string;
  error_group: string;
  count: number;
  first_at: number;
  last_at: number;
  reason: string;
  example_id: string;
  error_line: string | null;
  exact: boolean;
}

export interface Timeline {
  from: number;
  until: number;
  exact: boolean;
  groups: { task: string; error_group: string; counts: number[] }[];
}

export interface Binding {
  pool: string;
  key: string;
  index: number;
  state: "open" | "draining" | "released" | "lost";
  opened_at: number;
  used_at: number;
  closed_at: number | null;
  cleanup_failed: boolean;
}

export interface Schedule {
  name: string;
  timetable: { cron?: string; every?: number; timezone?: string };
  next: number | null;
  last: number | null;
  last_job: string | null;
  live: boolean;
  stopped: boolean;
}

export interface Wait {
  p50: number | null;
  p95: number | null;
  jobs: number;
}

export interface History {
  since: number | null;
  interval: number;
  at: number[];
  completed: number[];
  failed: number[];
  cancelled: number[];
  pending: number[];
  running: number[];
  waits: Record<"all" | Priority, Wait>;
}

export interface Finding {
  level: "ok" | "warn" | "error";
  topic: string;
  what: string;
  advice: string | null;
}

export interface Session {
  caller: string;
  scopes: string[];
  bound: boolean;
  queues: string[] | null;
  lane_prefix: string | null;
  cookie: boolean;
  version: string;
  features: string[];
}

export interface Found {
  jobs: JobSummary[];
  by: string[];
  queues: string[];
  lanes: { queue: string; lane: string }[];
  tasks: string[];
  bindings: Binding[];
  complete: boolean;
}

export interface Bulk {
  matched: number;
  changed: number;
  requested: number;
  more: boolean;
  done?: boolean;
  refusal: string | null;
  unchanged: Record<string, number>;
  problem?: { detail: string };
}
