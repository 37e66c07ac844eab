-- The feed of jobs that ended as failed or cancelled.

local MOST_ERROR_BYTES = 1000000

-- Failed and cancelled jobs by the number of their end, after the given one. A number of another generation, or one that
-- was not given yet, is from data that are lost: then all of them.
function ended.read(generation, after, limit)
    local last = tonumber(call('HGET', S.p .. 'counter', 'ending') or 0)
    local number = after or last
    if after and (generation ~= S.generation or after > last) then
        number = 0
    end
    local found = call('ZRANGEBYSCORE', S.p .. 'endings', string.format('(%.0f', number), '+inf', 'WITHSCORES', 'LIMIT', 0, limit + 1)
    local jobs, size, count = {}, 0, 0
    while count < math.min(limit, #found / 2) and size < MOST_ERROR_BYTES do
        count = count + 1
        local job = endings.get(found[2 * count - 1])
        if job then
            size = size + #(job.error or '')
            jobs[#jobs + 1] = {
                job.id, job.task, queue_cache.number(job.queue).name, job.kind or KIND.JOB, job.state, job.reason or false,
                job.error or false, job.finished_at,
            }
        end
        number = tonumber(found[2 * count])
    end
    return { jobs = jobs, cursor = string.format('%s_%.0f', S.generation, number), more = count < #found / 2 }
end
