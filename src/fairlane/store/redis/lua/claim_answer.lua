-- The answer to a claim: how many of the startable jobs fit into it, and the parts for each job.

local PAGE = 16 -- the first page of jobs whose size is checked; each page is four times as long as the one before

-- Content and headers of jobs.
local function contents_of(members)
    if S.has_headers == nil then
        S.has_headers = redis.call('EXISTS', S.p .. 'headers') == 1
    end
    return write_buffer.hmget(S.p .. 'job', members), S.has_headers and write_buffer.hmget(S.p .. 'headers', members) or {}
end

-- How many of these jobs fit into the answer. The first one that would exceed the byte limit ends the claim, unless it
-- is the only one. The content is kept for the answer, in the order of the starts.
function claim_answer.fitting(c, members)
    local count, kept, kept_headers, total = #members, c.contents, c.headers, c.bytes
    local at, from, length = #kept, 1, PAGE
    while from <= count do
        local page = members
        if from > 1 or count > length then
            page = { unpack(members, from, math.min(from + length - 1, count)) }
        end
        local contents, headers = contents_of(page)
        for i = 1, #page do
            local content, header = contents[i] or '', headers[i] or ''
            total = total + #content + #header
            if total > c.most_bytes and at > 0 then
                c.full = true
                return from + i - 2
            end
            at = at + 1
            kept[at], kept_headers[at], c.bytes = content, header, total
        end
        from, length = from + #page, 4 * length
    end
    return count
end

-- The answer for claimed jobs, three parts each: content, headers, and the packed record, or a list for a job without
-- one. `members`: their numbers.
function claim_answer.parts_of(members, records, contents, headers)
    local answer = {}
    if not contents then
        contents, headers = contents_of(members)
    end
    for i, each in ipairs(records) do
        answer[3 * i - 2], answer[3 * i - 1], answer[3 * i] = contents[i] or '', headers[i] or '', each
    end
    return answer
end

function claim_answer.record_of(e)
    return pack({ e.id, e.fence, e.attempt, e.class, e.suspect and true or false, e.lane and true or false, e.kind or KIND.JOB,
        e.started_at })
end
