-- Every key of a namespace. All begin with its prefix, which holds the hash tag, so a namespace is in one slot of a cluster.
-- Records (hashes; values are MessagePack maps, absent fields are nil):
--   counter          seq, arrival, session, binding, queue, settings, generation, steps, schema, term,
--                    ending
--   lost (a list)    reported data losses, newest first
--   queues           name -> number            queue      number -> {name, version, declared, override}
--   id               id -> seq; for a forgotten job '~' and {mark, state, until_}
--   job              seq -> time when it was stored (8 bytes), then the content
--   original         seq -> digest of the content that was enqueued, once a retry has replaced the payload
--   headers          seq -> bytes              live       seq -> record (see job_record.lua)
--   outcome          seq -> outcome, then the result
--   attempts         seq -> list of claims     progress   seq -> bytes
--   flow             flow -> finish, tag, head, first; domain -> clock
--   lane             lane -> places, whether it is ordered, granted
--   settling:QUEUE   lane -> the last number that was changed; unsettled (a set): the queues with such lanes
--   session          id -> session             pool:POOL  index -> id of its last session
--   binding          number -> binding         bound:POOL key -> number of the open binding
--   unknown (a set)  queue number, a space, and a task with declined jobs, now or recently, in an inbox of their own
--   unique           task NUL key -> {seq, id, state, until_}
--   task_set         name of a set -> the tasks of its sessions, each between two newlines
--   token            id -> a token of the HTTP service, its digest in hexadecimal
--   schedule         name -> schedule          leader (a string) -> {term, session, lease, expires}
--   tally:QUEUE      class and column -> count
--   ahead:SESSION (a list)  a pushed answer to the session's next claim (see idle_workers.lua)
-- Names: a domain is "queue.class.inbox", a flow "domain|lane", a limited lane "queue|lane".
-- Sorted sets: those of live jobs are listed in job_record.lua, the others here. Id sets are `alive/`, `by:task:…/`,
-- `by:session:…/` (see id_sets.lua); `held:SESSION:CLASS` is a plain set.
--   line:DOMAIN      flows with a claimable job: tag, then head and lane
--   backlog:QUEUE    lanes with jobs, by their waiting and running jobs (see job_record.lua)
--   by:KIND:VALUE    jobs by number, for reading
--   ties_of:WORKER   its open bindings; ties_lost:WORKER its lost ones that may have jobs to move (see bindings.lua)
--   overdue          declined jobs, by when they are offered to all workers again
--   task_sets        by when a session with it was last registered
--   ended:QUEUE:STATE  finished jobs by time, for retention
--   endings          failed and cancelled jobs, by their number in the order in which they ended

-- Keys and names that many jobs of a step share are built once.
local function shared(kind, first, second, make)
    local of_kind = S.names[kind]
    if not of_kind then
        of_kind = {}
        S.names[kind] = of_kind
    end
    local of_first = of_kind[first]
    if not of_first then
        of_first = {}
        of_kind[first] = of_first
    end
    local found = of_first[second]
    if not found then
        found = make(first, second)
        of_first[second] = found
    end
    return found
end

local function held(session, class)
    return S.p .. 'held:' .. session .. ':' .. class
end

-- The set of jobs of a class that a session holds.
function keys.held(session, class)
    return shared('held', session, class, held)
end

-- The inbox of declined jobs of a task, for sessions that know it: `session.unknown_inbox`.
function keys.unknown(task)
    return '~' .. task .. '/'
end

function keys.is_unknown(inbox)
    return inbox and sub(inbox, 1, 1) == '~'
end

function keys.domain(queue, class, inbox)
    return queue .. '.' .. class .. '.' .. inbox
end

function keys.flow(domain, lane)
    return domain .. '|' .. lane
end

-- The claimable jobs of a lane and class that any worker may claim.
function keys.ready(queue, class, lane)
    return S.p .. 'ready:' .. keys.flow(keys.domain(queue, class, ''), lane)
end

function keys.lane(queue, lane)
    return queue .. '|' .. lane
end

local function by(kind, value)
    return S.p .. 'by:' .. kind .. ':' .. value
end

function keys.by(kind, value)
    return shared('by', kind, value, by)
end

-- The jobs that ended in a session; see id_sets.lua.
function keys.of_session(session)
    return S.p .. 'by:session:' .. session .. '/'
end

-- The jobs of a task; `name` begins with its queue. See id_sets.lua.
function keys.task(name)
    return S.p .. 'by:task:' .. name .. '/'
end

local function of_task(queue, task)
    local name = queue .. ':' .. task
    queue_cache.note_task(name)
    return keys.task(name)
end

-- The jobs of a task in a queue, to add one.
function keys.of_task(queue, task)
    return shared('task', queue, task, of_task)
end

local function column(class, name)
    return class .. name
end

-- The field of a counter.
function keys.column(class, name)
    return shared('column', class, name, column)
end

-- By number of digits.
local ZEROS = {
    '000000000000000', '00000000000000', '0000000000000', '000000000000', '00000000000', '0000000000', '000000000', '00000000',
    '0000000', '000000', '00000', '0000', '000', '00', '0', '',
}

local function ended(queue, state)
    return S.p .. 'ended:' .. queue .. ':' .. state
end

function keys.ended(queue, state)
    return shared('ended', queue, state, ended)
end

-- With leading zeros, so that jobs that ended at the same moment are sorted by number.
function keys.padded(member)
    return ZEROS[#member] .. member
end

-- The member of a flow in its line: the arrival of its first job, then its lane.
function keys.line_member(arrival, lane)
    return ZEROS[#arrival] .. arrival .. lane
end

function keys.tally(queue)
    return S.p .. 'tally:' .. queue
end

function keys.worker(pool, index)
    return pool .. '/' .. index
end
