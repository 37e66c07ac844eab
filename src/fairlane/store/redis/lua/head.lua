-- What all files of the library share. `library.py` puts the declarations of the module tables before this file and the
-- modules behind it, each in a block of its own.

local call, pack, unpacked, bytes, parts, sub, byte -- set by the first step: these modules do not exist yet at load time
local S = {} -- the current step
local SLOTLESS = 'l' -- the counter of running jobs that take no slot
local COLUMNS = { -- the counters of jobs by state
    [STATE.SCHEDULED] = 's', [STATE.PENDING] = 'p', [STATE.RUNNING] = 'r', [STATE.COMPLETED] = 'c', [STATE.FAILED] = 'f',
    [STATE.CANCELLED] = 'x',
}
local PRICE = 1000 -- of a start with the default cost and weight: `fair_order.charge(1, 1)`
local GOLDEN_RATIO = 0.6180339887498949
local MOST_LOOKED_AT = 1000 -- no loop goes further than this in one call
