"""The function library, and the keys that it leaves on the server: which, under which names, and how many."""

from __future__ import annotations

import re
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from itertools import count
from typing import Any

import pytest
import redis

from fairlane.errors import StoreError
from fairlane.model.job import JobKind, JobState, Priority, Reason
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter
from fairlane.model.settings import LaneRule
from fairlane.model.states import Move
from fairlane.store import codes
from fairlane.store.clock import ManualClock
from fairlane.store.redis import library
from fairlane.store.redis import store as redis_store
from fairlane.store.redis.address import parse
from fairlane.store.redis.store import RedisStore
from tests.conformance.kit import Kit, Worker
from tests.servers import valkey
from tests.servers.valkey import ValkeyServer

LASTING = {"counter", "queue", "queues", "pools", "session", "sessions", "present"}
"""What a namespace has in which a worker waits, and nothing else is."""
NEW_COMMANDS = ("HEXPIRE", "HGETEX", "HSETEX", "SET IFEQ", "DELIFEQ", "XACKDEL", "WAITAOF", "ZRANGESTORE BYSCORE GT")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ValkeyServer]:
    """The server that all share, or one of its own for a test that counts what the server does."""
    if getattr(request, "param", "shared") == "own":
        with valkey.own_server() as started:
            yield started
    else:
        yield valkey.server()


@pytest.fixture
async def store(clock: ManualClock, server: ValkeyServer) -> AsyncIterator[RedisStore]:
    opened = await RedisStore.open(server.fresh_namespace(), clock=clock)
    yield opened
    await opened.close()


@pytest.fixture
def kit(store: RedisStore, clock: ManualClock) -> Kit:
    return Kit(store, clock)


def keys(store: RedisStore) -> dict[str, int]:
    """Every key of the namespace, without its prefix, with the number of its members."""
    prefix = store._functions._prefix
    found = {}
    with redis.Redis(port=valkey.server().port, decode_responses=True) as client:
        sizes = {"hash": client.hlen, "zset": client.zcard, "set": client.scard, "list": client.llen}
        for key in client.scan_iter(re.sub(r"([\[\]{}])", r"\\\1", prefix) + "*", count=1000):
            found[key.removeprefix(prefix)] = int(sizes.get(client.type(key), lambda _: 1)(key))
    return found


@contextmanager
def counted(server: ValkeyServer) -> Iterator[Callable[[], int]]:
    """Counts the commands that the server executes meanwhile, including those of functions."""
    with redis.Redis(port=server.port) as client:

        def calls() -> int:
            stats = client.info("commandstats")
            others = ("cmdstat_config", "cmdstat_info", "cmdstat_client", "cmdstat_hello")
            return sum(of["calls"] for name, of in stats.items() if not name.startswith(others))

        client.config_resetstat()
        yield calls


async def finish_all(worker: Worker) -> None:
    """Claim and complete until nothing is left."""
    while claimed := await worker.claim(50):
        await worker.complete(*claimed)


async def test_what_retention_does_not_keep_leaves_nothing_behind(kit: Kit, store: RedisStore) -> None:
    await kit.settings("default", LaneRule(pattern="strict:*", limit=1))
    worker = await kit.worker(slots=50)
    for number in range(30):
        await kit.enqueue(lane=f"lane-{number % 7}", headers=b"{}")
        await kit.enqueue(lane=f"strict:{number % 7}", priority=Priority(number % 3))
        await kit.enqueue(unique=f"value-{number}", sticky=f"key-{number % 3}")
        await kit.enqueue(delay=5.0, expires=50.0)
    await kit.enqueue(kind=JobKind.BROADCAST)
    kit.clock.advance(10.0)
    await store.promote()
    await finish_all(worker)
    await worker.fail(*await worker.claim(50))
    for number in range(3):
        await store.release("default", f"key-{number}")
    kit.clock.advance(60.0)
    await worker.renew()
    for _ in range(3):
        await store.prune(Retention(), limit=1_000)
        kit.clock.advance(100 * 86_400.0)
        await worker.renew()
    left = keys(store)
    # What a worker's inbox leaves is as much as there are workers, not as there were jobs.
    assert {name.partition(":")[0] for name in left} - LASTING <= {
        "flow",
        "domains",
        "inbox",
        "load",
        "pool",
        "tally",
    }
    # Of the flows nothing but the clocks of their domains.
    assert left["flow"] == sum(size for name, size in left.items() if name.startswith("domains:"))
    assert (await store.recount()).differences == ()


async def test_lanes_that_are_empty_leave_nothing_but_their_share(kit: Kit, store: RedisStore) -> None:
    await kit.settings("default", LaneRule(pattern="strict:*", limit=1))
    worker = await kit.worker(slots=50)
    before = set(keys(store))
    for number in range(20):
        await kit.enqueue(lane=f"strict:{number}")
        await kit.enqueue(lane=f"open:{number}")
    await finish_all(worker)
    new = {name.partition(":")[0] for name in set(keys(store)) - before}
    assert not new & {"lane", "lanes", "wait", "hold", "ready", "line", "backlog", "short"}


@pytest.mark.parametrize(
    "wishes",
    [{}, {"lane": "open"}, {"lane": "strict:1"}, {"cost": 2.5}, {"unique": "x"}, {"retries": 0, "pool": "other"}],
    ids=str,
)
async def test_plain_jobs_have_packed_records(kit: Kit, store: RedisStore, wishes: dict[str, Any]) -> None:
    """Nothing else shows whether the fast path was taken."""
    await kit.settings("default", LaneRule(pattern="strict:*", limit=1))
    worker = await kit.worker()

    async def kind(hash: str) -> bytes:
        [record] = await store._functions.look("HVALS", hash)
        return bytes(record[:1])

    await kit.enqueue(**wishes)
    assert await kind("live") == b"p"
    [job] = await worker.claim()
    assert await kind("live") == b"r"
    await worker.complete(job)
    # The end of a job with a unique key needs more than a packed record holds.
    assert (await kind("outcome") == b"c") is ("unique" not in wishes)


async def test_namespaces_on_one_server_do_not_mix(clock: ManualClock) -> None:
    """The functions cache names between calls, also of other namespaces."""
    stores = [await RedisStore.open(valkey.server().fresh_namespace(), clock=clock) for _ in range(2)]
    kits = [Kit(store, clock) for store in stores]
    for number in range(4):
        for kit in kits:
            await kit.enqueue(task=f"task-{number % 2}")
    for store, kit in zip(stores, kits, strict=True):
        assert (await store.recount()).differences == ()
        found = await store.find(Filter(task="task-1"))
        assert len(found.jobs) == 2
        assert len(await (await kit.worker()).claim(9)) == 4
        await store.close()


async def test_every_key_stands_under_one_hash_tag(kit: Kit, store: RedisStore) -> None:
    worker = await kit.worker()
    await kit.enqueue(lane="{other}", sticky="{k}", unique="{u}")
    await finish_all(worker)
    prefix = store._functions._prefix
    assert re.fullmatch(r"\{[^{}]+\}:", prefix)
    assert all("\n" not in name for name in keys(store))


async def test_a_server_that_forgot_the_library_is_given_it_again(kit: Kit) -> None:
    with valkey.own_server() as server:
        store = await RedisStore.open(server.url)
        try:
            server.ask("FUNCTION", "FLUSH")
            assert await store.queues() == []
            server.restart()
            assert await store.queues() == []
        finally:
            await store.close()


def test_two_versions_of_the_library_stand_side_by_side() -> None:
    with valkey.own_server() as server:
        older = library.text().replace(library.name(), "fairlane_older")
        server.ask("FUNCTION", "LOAD", library.text())
        server.ask("FUNCTION", "LOAD", older)
        names = {entry[1] for entry in server.ask("FUNCTION", "LIST")}
        assert names == {library.name(), "fairlane_older"}


def test_the_library_uses_no_command_that_is_too_new_or_looks_at_every_key() -> None:
    text = library.text()
    for command in (*NEW_COMMANDS, "'KEYS'", "'SCAN'", "'RANDOMKEY'"):
        assert command not in text


def test_the_lua_files_are_the_modules_of_the_library() -> None:
    stored = {file.name.removesuffix(".lua") for file in (files("fairlane.store.redis") / "lua").iterdir()}
    assert stored == {"head", *library.MODULES}


def test_lua_knows_every_code_by_the_name_that_python_gives_it() -> None:
    numbers = {
        "STATE": {state.name: codes.STATES.index(state, 1) for state in JobState},
        "GATE": {"UNBOUND": codes.UNBOUND, "CLEANUP": codes.CLEANUP, "PARENT": codes.PARENT},
        "CLASS": {priority.name: int(priority) for priority in Priority},
    }
    words = {"MOVE": Move, "KIND": JobKind, "REASON": Reason}
    for kind, members in numbers.items():
        for name, code in members.items():
            assert codes.with_lua_codes(f"x == {kind}.{name} then") == f"x == {code} then"
    for kind, enum in words.items():
        for member in enum:
            assert codes.with_lua_codes(f"{{ {kind}.{member.name} }}") == f"{{ '{member.value}' }}"


@pytest.mark.parametrize("name", ["STATE.SLEEPING", "GATE.CLOSED", "MOVE.COMPLETED", "KIND.TASK", "REASON.NONE"])
def test_a_code_that_python_does_not_know_is_an_error_when_the_library_is_built(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        codes.with_lua_codes(f"e.state = {name}")


def test_no_code_is_left_without_its_value_in_the_library() -> None:
    assert not re.search(r"\b(STATE|GATE|MOVE|KIND|CLASS|REASON)\.", library.text())


def test_a_namespace_is_named_by_the_url() -> None:
    assert parse("redis://host?namespace=jobs").prefix == "{jobs}:"


@pytest.mark.parametrize(
    "lost", ["flow", "line:1.1.", "backlog:1", "unique", "alive/", "alive/0", "tally:1", "ready:1.1.|lane"]
)
async def test_a_recount_makes_anew_whatever_follows_from_the_jobs(kit: Kit, store: RedisStore, lost: str) -> None:
    worker = await kit.worker(slots=10)
    ids = [await kit.enqueue(lane="lane", unique="value"), await kit.enqueue(lane="lane")]
    with redis.Redis(port=valkey.server().port) as client:
        assert client.delete(f"{store._functions._prefix}{lost}") == 1
    assert (await store.recount()).differences != ()
    assert (await store.recount()).differences == ()
    assert await worker.claim_ids(10) == ids
    [again] = await store.enqueue([kit.new(unique="value")])
    assert not again.created


async def test_a_recount_finds_what_a_session_holds(kit: Kit, store: RedisStore) -> None:
    worker = await kit.worker(slots=2)
    id = await kit.enqueue()
    [claimed] = await worker.claim()
    with redis.Redis(port=valkey.server().port) as client:
        held = f"{store._functions._prefix}held:{worker.id}:1"
        assert client.delete(held) == 1
        assert (await store.recount()).differences == (f"job {id} in held:{worker.id}:1 was nil, is true",)
        assert client.scard(held) == 1
        client.sadd(held, "99")
    assert (await store.recount()).differences == (f"number 99 in held:{worker.id}:1 was there, is nil",)
    assert (await store.recount()).differences == ()
    await worker.complete(claimed)


async def test_a_recount_removes_what_stands_for_no_job(kit: Kit, store: RedisStore) -> None:
    await kit.enqueue()
    prefix = store._functions._prefix
    with redis.Redis(port=valkey.server().port) as client:
        client.sadd(f"{prefix}alive/0", "99")
        client.zadd(f"{prefix}line:1.1.", {"0000000000000999nobody": 5})
        client.zadd(f"{prefix}backlog:1", {"nobody": 5})
    assert len((await store.recount()).differences) == 3
    assert (await store.recount()).differences == ()


async def test_places_that_a_fault_has_left_free_are_handed_on_and_noted_no_longer(kit: Kit, store: RedisStore) -> None:
    await kit.settings("default", LaneRule(pattern="one:*", limit=1))
    worker = await kit.worker(slots=10)
    ids = [await kit.enqueue(lane="one:1") for _ in range(2)]
    await kit.enqueue(lane="one:2")
    [first, _] = await worker.claim(10)
    prefix = store._functions._prefix
    with redis.Redis(port=valkey.server().port) as client:
        # The place of the first lane is free; that of the second was taken since, and the third is gone.
        client.hset(f"{prefix}lane", "1|one:1", struct.pack(">dBd", 1, True, 0))
        client.sadd(f"{prefix}short", "1|one:1", "1|one:2", "1|one:3")
        assert (await store.admit()).repaired == 1
        assert client.exists(f"{prefix}short") == 0
    assert await worker.claim_ids(10) == ids[1:]
    await worker.complete(first)


@pytest.mark.parametrize("server", ["own"], indirect=True)
async def test_a_change_of_rules_leaves_the_lanes_alone_that_it_is_not_about(
    kit: Kit, store: RedisStore, server: ValkeyServer
) -> None:
    rules = [LaneRule(pattern="one:*", limit=1), LaneRule(pattern="two:*", limit=2)]
    await kit.settings("default", *rules)
    numbers = count()

    async def commands(lanes: int) -> int:
        """How many commands it takes to limit a lane, when there are so many more that have jobs."""
        for _ in range(lanes):
            names = [f"{kind}:{next(numbers)}" for kind in ("one", "two", "free")]
            await store.enqueue([kit.new(lane=lane) for lane in names for _ in range(3)])
        rules.append(LaneRule(pattern=f"other:{lanes}", limit=1))
        with counted(server) as calls:
            await kit.settings("default", *rules, version=len(rules))
            return calls()

    few, many = await commands(5), await commands(100)
    assert many <= few + 3
    assert (await store.recount()).differences == ()


@pytest.mark.parametrize("server", ["own"], indirect=True)
async def test_a_lane_in_which_thousands_wait_is_paused_and_resumed_by_few_commands(
    kit: Kit, store: RedisStore, server: ValkeyServer
) -> None:
    await kit.enqueue_all([kit.new(lane="many") for _ in range(3_500)])
    for version, rules in enumerate([[LaneRule(pattern="many", paused=True)], []]):
        with counted(server) as calls:
            await kit.settings("default", *rules, version=version)
            assert calls() < 150
        assert (await store.recount()).differences == ()
    assert len(await (await kit.worker(slots=5_000)).claim(5_000)) == 3_500


async def test_a_recount_of_more_jobs_than_others_can_wait_for_is_refused(
    kit: Kit, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "MOST_RECOUNTED", 3)
    await kit.enqueue_all([kit.new() for _ in range(3)])
    assert (await store.recount()).jobs == 3
    await kit.enqueue()
    with pytest.raises(StoreError, match=r"4 jobs are too many for a recount.* at most 3 jobs wait or run"):
        await store.recount()
