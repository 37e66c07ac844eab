-- Sets of job numbers that nearly all jobs pass through. They are stored in blocks, one for each range of numbers: a
-- small set of integers takes half of the time and a tenth of the memory of a sorted set (measured). The name of such a
-- set ends in '/': alone it is the key of the sorted set of its blocks, and with a block number the key of that block.

local BLOCK = 512 -- the default up to which a server stores a set as an array of integers

function id_sets.block(number)
    return math.floor(number / BLOCK)
end

-- Record that a block is not empty. `last`: the block of each set that is known to be recorded, see
-- `queue_cache.blocks`. Past `call`: block lists are not buffered.
function id_sets.note(last, name, block)
    if last[name] ~= block then
        redis.call('ZADD', name, block, block)
        last[name] = block
    end
end

local function thinned(name, block)
    S.thinned = S.thinned or {}
    S.thinned[name .. block] = { name = name, block = block }
end

function id_sets.add(name, member)
    local block = id_sets.block(member)
    id_sets.note(queue_cache.blocks(), name, block)
    write_buffer.sadd(name .. block, member)
end

function id_sets.drop(name, member)
    local block = id_sets.block(member)
    write_buffer.srem(name .. block, member)
    thinned(name, block)
end

-- Many members by block, for `add_all` and `drop_all`. Consecutive members are mostly in one block.
function id_sets.by_block(members)
    local blocks, last, list = {}, nil, nil
    for _, member in ipairs(members) do
        local block = id_sets.block(member)
        if block ~= last then
            list = blocks[block] or {}
            blocks[block], last = list, block
        end
        list[#list + 1] = member
    end
    return blocks
end

function id_sets.add_all(name, blocks)
    for block, list in pairs(blocks) do
        id_sets.note(queue_cache.blocks(), name, block)
        write_buffer.sadd_all(name .. block, list)
    end
end

-- Add consecutive members, beginning with the number `first`.
function id_sets.add_run(name, members, first)
    local count, from = #members, 1
    while from <= count do
        local block = id_sets.block(first + from - 1)
        local to = math.min(count, (block + 1) * BLOCK - first)
        id_sets.note(queue_cache.blocks(), name, block)
        write_buffer.sadd_all(name .. block, members, from, to)
        from = to + 1
    end
end

function id_sets.drop_all(name, blocks)
    for block, list in pairs(blocks) do
        write_buffer.srem_all(name .. block, list)
        thinned(name, block)
    end
end

-- Remove the entries of blocks that this step has emptied.
function id_sets.drop_empty_blocks()
    local all, last = S.thinned, nil
    S.thinned = nil
    for key, at in pairs(all or {}) do
        if call('EXISTS', key) == 0 then
            last = last or queue_cache.blocks()
            last[at.name] = nil
            redis.call('ZREM', at.name, at.block)
        end
    end
end

-- All numbers of a set, read from the server: for a recount.
function id_sets.all(name)
    local found = {}
    for _, block in ipairs(call('ZRANGE', name, 0, -1)) do
        for _, member in ipairs(call('SMEMBERS', name .. block)) do
            found[#found + 1] = member
        end
    end
    return found
end

-- The highest numbers of a set below `before`: `count` of them, or a few more.
function id_sets.below(name, before, count)
    local found = {}
    -- One block more: all numbers of the first may be too high.
    local blocks = call('ZREVRANGEBYSCORE', name, id_sets.block(before), '-inf', 'LIMIT', 0, count + 1)
    for _, block in ipairs(blocks) do
        for _, member in ipairs(call('SMEMBERS', name .. block)) do
            if tonumber(member) < before then
                found[#found + 1] = member
            end
        end
        if #found >= count then
            break
        end
    end
    return found
end

-- As `below`, without the members that are in `other` too, a set in blocks of the same size: the server compares whole
-- blocks. Looks at `most` blocks. The second result is the number from which to continue, nil after the last block.
function id_sets.below_without(name, other, before, count, most)
    local found = {}
    local blocks = call('ZREVRANGEBYSCORE', name, id_sets.block(before - 1), '-inf', 'LIMIT', 0, most + 1)
    for i, block in ipairs(blocks) do
        if i > most or #found >= count then
            return found, (tonumber(block) + 1) * BLOCK
        end
        for _, member in ipairs(call('SDIFF', name .. block, other .. block)) do
            if tonumber(member) < before then
                found[#found + 1] = member
            end
        end
    end
    return found, nil
end
