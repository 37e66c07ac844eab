-- The content of a job as it was requested (`encoding.Content`): opaque except for the place of its payload. An id stands
-- for the content that was enqueued, also when a retry has replaced the payload since.

-- The offset behind a byte string, or behind the nil in its place.
function job_content.skip_bytes(raw, at)
    local kind, a, b, c, d = string.byte(raw, at + 1, at + 5)
    if kind == 0xc0 then
        return at + 1
    elseif kind == 0xc4 then
        return at + 2 + a
    elseif kind == 0xc5 then
        return at + 3 + a * 256 + b
    end
    return at + 5 + ((a * 256 + b) * 256 + c) * 256 + d
end

-- The offsets before and behind the payload: it follows six fields behind the time (8 bytes) and the list header (3).
local function payload_place(raw)
    local fields = sub(raw, 12)
    local before = cmsgpack.unpack_limit(fields, 6)
    return 11 + before, 11 + job_content.skip_bytes(fields, before)
end

function job_content.get(seq)
    local raw = call('HGET', S.p .. 'job', seq)
    return raw and sub(raw, 9)
end

-- A digest of the content that a job was enqueued with; `content`: what it has now.
function job_content.mark(seq, content)
    return call('HGET', S.p .. 'original', seq) or redis.sha1hex(content)
end

-- Whether a job was enqueued with this content.
function job_content.is_same(seq, content)
    local original = call('HGET', S.p .. 'original', seq)
    if original then
        return original == redis.sha1hex(content)
    end
    return job_content.get(seq) == content
end

-- Replace the payload, given as it is encoded in the content. Content that cannot be read is left alone: the next claim
-- fails the job.
function job_content.replace_payload(seq, payload)
    local member = write_buffer.text(seq)
    local raw = write_buffer.hget(S.p .. 'job', member) or ''
    local done, before, behind = pcall(payload_place, raw)
    if done then
        call('HSETNX', S.p .. 'original', member, redis.sha1hex(sub(raw, 9)))
        write_buffer.hset(S.p .. 'job', member, sub(raw, 1, before) .. payload .. sub(raw, behind + 1))
    end
end
