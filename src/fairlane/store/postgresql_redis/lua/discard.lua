-- Remove `count` tokens, whose jobs were claimed without them. After a claim that found fewer jobs than it had tokens, also
-- remove all tokens that are older than the claim.
-- KEYS: a list. ARGV: count, microseconds since the claim was sent (negative: it found enough jobs).
local removed = 0
for _ = 1, tonumber(ARGV[1]) do
    if not redis.call('LPOP', KEYS[1]) then
        return removed
    end
    removed = removed + 1
end
local since = tonumber(ARGV[2])
if since >= 0 then
    local time = redis.call('TIME')
    -- The margin covers the time in which this call was sent.
    local sent = tonumber(time[1]) * 1000000 + tonumber(time[2]) - since - MARGIN_MICROSECONDS
    while true do
        local token = redis.call('LINDEX', KEYS[1], 0)
        if not token or tonumber(string.match(token, '^%d+') or 0) > sent then
            break
        end
        redis.call('LPOP', KEYS[1])
        removed = removed + 1
    end
end
return removed
