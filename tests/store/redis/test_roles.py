"""Roles: what the rights in `roles.py` allow an owner, a worker and a viewer, and what they do not."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlane.errors import InvalidInput, StoreError
from fairlane.model import tokens
from fairlane.model.job import JobState, NewJob, Priority
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter
from fairlane.model.schedule import Schedule, Timetable
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.settings import QueueSettings, SettingsChange
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import complete
from fairlane.store import open_store
from fairlane.store.port import Store
from fairlane.store.redis import library
from fairlane.store.redis.address import parse
from fairlane.store.redis.connection_pool import Connections
from fairlane.store.redis.driver_errors import NotAllowed
from fairlane.store.redis.functions import READING
from fairlane.store.redis.roles import IN_FUNCTIONS, KINDS, READS, WRITES, rights
from tests.servers.valkey import ValkeyServer, own_server, system

pytestmark = pytest.mark.anyio
PAGE = Path(__file__).resolve().parents[3] / "docs" / "redis.md"
NAMESPACE = "lean.jobs"
PREFIX = f"{{{NAMESPACE}}}:"
EVERYTHING = Claim(number=1, asks=tuple(Ask("default", priority, 10) for priority in Priority), total=10)
WORKER = NewSession(id="w", kind=SessionKind.WORKER, queues=("default",), slots=Slots(total=10))
FIRST = {"HMGET", "TIME"}
"""Every step begins with these, also the one that looks at the rights."""
PROGRAMS: list[Path | None] = [None, *([found] if (found := system()) else [])]


@pytest.fixture(scope="module", params=PROGRAMS, ids=["first", "system"][: len(PROGRAMS)])
def served(request: pytest.FixtureRequest) -> Iterator[ValkeyServer]:
    """A server that accepts only an administrator and the users of a namespace."""
    with own_server(request.param, password="open:ses@me") as started:
        for kind in (*KINDS, *KINDS):  # twice is as good as once
            started.ask("ACL", "SETUSER", kind, "on", ">hush", *rights(kind, NAMESPACE))
        yield started


@pytest.fixture
def mine(served: ValkeyServer) -> ValkeyServer:
    """The same without a job or a function."""
    served.ask("FLUSHALL")
    served.ask("FUNCTION", "FLUSH")
    return served


def url_of(mine: ValkeyServer, user: str) -> str:
    return f"redis://{user}:hush@127.0.0.1:{mine.port}/3?namespace={NAMESPACE}&pool=2"


Open = Callable[[str], Awaitable[Store]]


@pytest.fixture
async def opened(mine: ValkeyServer) -> AsyncIterator[Open]:
    """Opens the store as one of the users."""
    stores: list[Store] = []

    async def open_as(user: str) -> Store:
        stores.append(await open_store(url_of(mine, user)))
        return stores[-1]

    yield open_as
    for store in stores:
        await store.close()


async def denied(call: Awaitable[Any], command: str = "FCALL") -> None:
    with pytest.raises(NotAllowed, match=rf"does not allow the command {command} .*ACL SETUSER"):
        await call


async def look_around(store: Store) -> None:
    """Every reading verb."""
    [job] = await store.get(["a"])
    assert job is not None
    for where in (Filter(queue="default"), Filter(state=JobState.RUNNING), Filter(task="task"), Filter()):
        await store.find(where)
    await store.positions(["a", "b", "later"])
    assert await store.queues()
    await store.lanes("default")
    await store.lane_line("default", "user:ann")
    await store.failures()
    await store.ended((await store.ended(None)).cursor)
    assert await store.sessions()
    await store.bindings()
    await store.leader()
    await store.declare([])


async def receives(listener: Store, sender: Store, queue: str) -> None:
    """The listener is notified of what the sender stores."""
    subscription = listener.wakeups.subscribe([f"queue:{queue}"])
    await sender.enqueue([NewJob(id=queue, task="task", queue=queue)])
    assert await subscription.wait(10) == {f"queue:{queue}"}
    subscription.close()


@pytest.mark.parametrize("kind", ["owner", "worker"])
async def test_a_worker_may_use_every_verb(opened: Open, kind: str) -> None:
    await opened("owner")
    store = await opened(kind)
    await store.configure([SettingsChange(queue="default", declared=QueueSettings(limit=50), version=1)])
    await store.enqueue([NewJob(id="a", task="task", lane="user:ann"), NewJob(id="b", task="task", sticky="key")])
    await store.enqueue([NewJob(id="later", task="task", delay=60), NewJob(id="one", task="task", unique="x")])
    await store.register(WORKER)
    claimed = await store.claim("w", EVERYTHING)
    held = [job.held for job in claimed]
    assert {job.id for job in claimed} >= {"a", "one"}
    await store.progress("w", [(held[0], b"1")])
    await store.renew("w", held, claim=1)
    await look_around(store)
    await store.finish("w", [complete(each, b"1") for each in held])
    term = await store.lead("w", lease=10)
    assert term is not None
    for work in (store.promote, store.admit, store.rescue):
        await work(term=term.number)
    await store.prune(Retention(), term=term.number)
    await store.resign(term.number)
    await store.declare([Schedule(name="s", timetable=Timetable(every=60), job=b"{}")])
    await store.cancel(["later"])
    token = await store.add_token(tokens.make("robot", ["read"])[0])
    assert await store.tokens() == [token]
    assert await store.revoke_token(token.id)
    await store.release("default", "key")
    await store.leave("w", begun=[])
    assert (await store.recount()).differences == ()


async def test_a_viewer_may_look_and_do_nothing(opened: Open) -> None:
    worker, store = await opened("owner"), await opened("viewer")
    await worker.enqueue([NewJob(id="a", task="task", lane="user:ann")])
    await worker.register(WORKER)
    await look_around(store)
    assert await store.migrate() == await worker.migrate()

    await denied(store.enqueue([NewJob(id="b", task="task")]))
    await denied(store.cancel(["a"]))
    await denied(store.claim("w", EVERYTHING))
    await denied(store.register(NewSession(id="v", kind=SessionKind.WAITER)))
    await denied(store.configure([SettingsChange(queue="default", declared=QueueSettings(limit=1), version=9)]))
    await denied(store.lead("v", lease=10))
    await denied(store.prune(Retention()))
    await denied(store.recount())
    assert (await worker.get(["b"])) == [None]


async def test_every_role_receives_wakeups(opened: Open) -> None:
    worker, viewer = await opened("owner"), await opened("viewer")
    await receives(viewer, worker, "a")
    await receives(worker, await opened("worker"), "b")


@pytest.mark.parametrize("kind", KINDS)
async def test_no_role_reaches_beyond_the_namespace(mine: ValkeyServer, opened: Open, kind: str) -> None:
    await opened("owner")
    connections = Connections(parse(url_of(mine, kind)))
    forbidden: list[tuple[str, ...]] = [
        ("GET", "theirs"),
        ("HGET", "{lean.jobs.too}:job", "1"),
        ("FCALL_RO", library.function("queues"), "1", "{theirs}:", "", ""),
        ("SUBSCRIBE", "{theirs}:jobs"),
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "requirepass"),
        ("ACL", "LIST"),
        ("SLOWLOG", "GET"),
        ("MONITOR",),
        ("EVAL", "return 1", "0"),
        ("FUNCTION", "DELETE", library.name()),
        ("FUNCTION", "FLUSH"),
        ("CLIENT", "LIST"),
        ("SHUTDOWN",),
    ]
    if kind == "viewer":
        forbidden += [("HSET", f"{PREFIX}job", "1", "x"), ("PUBLISH", f"{PREFIX}jobs", "x")]
    if kind != "owner":
        forbidden += [("FUNCTION", "LOAD", "REPLACE", library.text())]
    for command in forbidden:
        await denied(connections.call(*command), command[0])
    await connections.close()


# -- what is missing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["worker", "viewer"])
async def test_a_user_that_may_not_load_the_functions_gets_advice(opened: Open, kind: str) -> None:
    with pytest.raises(StoreError, match="Run `fairlane migrate` as a user with the owner role"):
        await opened(kind)
    await opened("owner")
    await opened(kind)


async def test_a_missing_namespace_is_reported(mine: ValkeyServer, opened: Open) -> None:
    await opened("owner")
    mine.ask("FLUSHALL")
    with pytest.raises(StoreError, match="does not exist yet"):
        await opened("viewer")


@pytest.mark.parametrize("command", sorted({*IN_FUNCTIONS} - FIRST))
async def test_no_step_begins_without_all_rights(mine: ValkeyServer, opened: Open, command: str) -> None:
    await opened("owner")
    mine.ask("ACL", "SETUSER", "short", "on", ">hush", *rights("worker", NAMESPACE), f"-{command.lower()}")
    with pytest.raises(StoreError, match=rf"lacks rights that the functions need \({command}\).*ACL SETUSER"):
        await opened("short")


@pytest.mark.parametrize("command", sorted(FIRST))
async def test_a_right_that_every_step_needs_is_missed_at_once(mine: ValkeyServer, opened: Open, command: str) -> None:
    await opened("owner")
    mine.ask("ACL", "SETUSER", "short", "on", ">hush", *rights("worker", NAMESPACE), f"-{command.lower()}")
    with pytest.raises(StoreError, match=r"commands that the functions use .*ACL SETUSER"):
        await opened("short")


@pytest.mark.parametrize("less", ["resetkeys", "resetchannels"])
async def test_keys_and_channels_are_looked_at_too(mine: ValkeyServer, opened: Open, less: str) -> None:
    await opened("owner")
    other = {"resetkeys": "~{other}:*", "resetchannels": "&{other}:*"}[less]
    mine.ask("ACL", "SETUSER", "short", "on", ">hush", *rights("worker", NAMESPACE), less, other)
    with pytest.raises(StoreError, match="ACL SETUSER"):
        await opened("short")


# -- the lists ---------------------------------------------------------------------------------------------------------


def test_the_roles_know_every_command_of_the_functions() -> None:
    named = set(re.findall(r"call\((?:short and )?'([A-Z]+)'", library.text()))
    gathered = set(re.findall(r"'(ZADD|HSET|ZREM|HDEL|SADD|SREM)'", library.text()))

    assert named | gathered == {command.partition("|")[0] for command in IN_FUNCTIONS}
    assert set(READS).isdisjoint(WRITES)


def test_reading_verbs_are_those_that_write_nothing() -> None:
    flagged = re.findall(r"^verb\('(\w+)', \{ 'no-writes' \}", library.text(), re.MULTILINE)

    assert set(flagged) == READING


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_the_same_rights(kind: str) -> None:
    assert f"    ACL SETUSER fairlane_{kind} {' '.join(rights(kind))}\n" in PAGE.read_text()


def test_a_role_that_is_none() -> None:
    with pytest.raises(InvalidInput, match="viewer, worker, owner"):
        rights("producer")
