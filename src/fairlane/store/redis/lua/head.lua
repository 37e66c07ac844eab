-- The library of functions: `#!lua name=…` goes before this file and all others of the folder behind it, in the order of
-- `library.py`. A function library is compiled and set up once per server, where a script would set up all its functions
-- with each call (measured: 150 of them cost 9 µs a call, 300 in a table 46).

local call, pack, unpacked, bytes, parts, sub, byte -- set by the first step: while the library is loaded they are not there yet
local S = {} -- the step under way
local keys, writes, step, catalog, numbers, tickets, entries, flows, places, limits = {}, {}, {}, {}, {}, {}, {}, {}, {}, {}
local bindings, broadcasts, outcomes, admission, arrivals, idle, single, presence = {}, {}, {}, {}, {}, {}, {}, {}
local report, answers, batches, dispatch, settings, pruning = {}, {}, {}, {}, {}, {}
local reading, standings, losses, recounting, passes, damage = {}, {}, {}, {}, {}, {}

local SCHEDULED, PENDING, RUNNING, COMPLETED, FAILED, CANCELLED = 1, 2, 3, 4, 5, 6
local UNBOUND, CLEANUP, PARENT = 1, 2, 4
local SLOTLESS = 'l'
local COLUMNS = { 's', 'p', 'r', 'c', 'f', 'x' } -- of a tally, by state
local PRICE = 1000 -- of a start, where neither job nor lane says otherwise: `flows.charge(1, 1)`
local MOST_LOOKED_AT = 1000 -- no loop goes further than this in one call
