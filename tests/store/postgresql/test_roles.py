"""Roles: what the grants in `sql/roles.sql` allow a worker, a producer and a viewer, and what they do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlane.errors import Conflict, QueueFull, StoreError
from fairlane.model import tokens
from fairlane.model.job import JobKind, JobState, NewJob, Priority
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter
from fairlane.model.schedule import Schedule, Timetable
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.settings import QueueSettings, SettingsChange
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import complete
from fairlane.store import open_store
from fairlane.store.port import Store
from fairlane.store.postgresql import library
from fairlane.store.postgresql.address import driver, parse
from fairlane.store.postgresql.database import Database
from fairlane.store.postgresql.migrator import migrate
from fairlane.store.postgresql.statements import PACKAGE, grants, placed, quoted
from fairlane.store.postgresql.store import PostgresqlStore
from fairlane.store.shared.queries import load_queries
from tests.servers.postgresql import server

from ..postgresql_urls import as_role

pytestmark = pytest.mark.anyio
asyncpg = driver()
PAGE = Path(__file__).resolve().parents[3] / "docs" / "postgresql.md"
SCHEMA = "Lean-Jobs"
KINDS = ("worker", "producer", "viewer")
LENT = {
    "admit_queues",
    "cancel",
    "enqueue",
    "enqueue_any",
    "enqueue_one",
    "insert_arriving",
    "read_claimable",
    "read_jobs",
    "read_seconds",
    "read_positions",
    "read_workers",
    "use_library",
}
"""The functions that run with the rights of the schema's owner."""
EVERYTHING = Claim(number=1, asks=tuple(Ask("default", priority, 10) for priority in Priority), total=10)


class Site:
    """A database with a schema whose owner is not a superuser, and the roles that the owner created."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.prefix = f"site_{url.partition('_test_')[2]}"

    def role(self, kind: str) -> str:
        return f"{self.prefix}_{kind}"

    def url_of(self, kind: str) -> str:
        return as_role(self.url, self.role(kind)) + f"?schema={SCHEMA}&pool=2"

    async def make(self, admin: Database) -> None:
        for kind in ("owner", *KINDS, "stranger"):
            await admin.execute(f"CREATE ROLE {self.role(kind)} LOGIN")
        await admin.execute(f"CREATE SCHEMA {quoted(SCHEMA)} AUTHORIZATION {self.role('owner')}")
        owner = Database(parse(self.url_of("owner")))
        await migrate(owner)
        for kind in (*KINDS, *KINDS):  # twice is as good as once
            await owner.execute(grants(kind, self.role(kind), SCHEMA))
        await owner.close()

    async def remove(self, admin: Database) -> None:
        for kind in ("owner", *KINDS, "stranger"):
            await admin.execute(f"DROP OWNED BY {self.role(kind)} CASCADE; DROP ROLE {self.role(kind)}")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    made = server().fresh_database(migrated=False)
    yield made
    server().done(made)


@pytest.fixture(scope="module")
def made(url: str) -> Iterator[Site]:
    """Made once, because that is what takes the time."""

    async def with_admin(work: Callable[[Database], Awaitable[None]]) -> None:
        admin = Database(parse(url))
        await work(admin)
        await admin.close()

    site = Site(url)
    asyncio.run(with_admin(site.make))
    yield site
    asyncio.run(with_admin(site.remove))


@pytest.fixture
async def site(made: Site) -> Site:
    """The same without a job."""
    admin = Database(parse(made.url))
    look = "SELECT oid::regclass::text AS name FROM pg_class WHERE relkind = 'r' AND relnamespace = to_regnamespace($1)"
    tables = {row["name"] for row in await admin.fetch(look, quoted(SCHEMA))} - {
        f"{quoted(SCHEMA)}.{name}" for name in ("migration", "library")
    }
    await admin.execute(f"TRUNCATE {', '.join(tables)}")
    await admin.close()
    return made


Open = Callable[[str], Awaitable[Store]]


@pytest.fixture
async def opened(site: Site) -> AsyncIterator[Open]:
    """Opens the store as one of the roles."""
    stores: list[Store] = []

    async def open_as(kind: str) -> Store:
        stores.append(await open_store(site.url_of(kind)))
        return stores[-1]

    yield open_as
    for store in stores:
        await store.close()


async def denied(call: Awaitable[Any]) -> None:
    with pytest.raises(StoreError, match=r"permission denied .*grant"):
        await call


async def run_one(worker: Store, id: str) -> None:
    """Let a worker complete a job."""
    session = NewSession(id="w", kind=SessionKind.WORKER, queues=("default",), slots=Slots(total=10))
    await worker.register(session)
    jobs = [job for job in await worker.claim("w", EVERYTHING) if job.id == id]
    await worker.finish("w", [complete(job.held, b'"done"') for job in jobs])
    await worker.leave("w", begun=[])


async def test_a_worker_may_use_every_verb(opened: Open) -> None:
    store = await opened("worker")
    await store.configure([SettingsChange(queue="default", declared=QueueSettings(limit=50), version=1)])
    await store.enqueue([NewJob(id="a", task="task", lane="user:ann"), NewJob(id="b", task="task", sticky="key")])
    await store.enqueue([NewJob(id="later", task="task", delay=60), NewJob(id="one", task="task", unique="x")])
    await store.register(NewSession(id="w", kind=SessionKind.WORKER, queues=("default",), slots=Slots(total=10)))
    claimed = await store.claim("w", EVERYTHING)
    held = [job.held for job in claimed]
    assert {job.id for job in claimed} >= {"a", "one"}
    await store.progress("w", [(held[0], b"1")])
    await store.renew("w", held, claim=1)
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
    await look_around(store)


async def look_around(store: Store) -> None:
    """Every reading verb."""
    [job] = await store.get(["a"])
    assert job is not None
    assert job.payload == b"[[],{}]"
    assert (await store.find(Filter(queue="default"))).jobs
    await store.positions(["a", "b", "later"])
    assert await store.queues()
    await store.lanes("default")
    await store.lane_line("default", "user:ann")
    await store.failures()
    await store.ended((await store.ended(None)).cursor)
    await store.sessions()
    await store.bindings()
    await store.leader()
    await store.declare([])


async def test_a_viewer_may_look_and_do_nothing(opened: Open) -> None:
    worker, store = await opened("worker"), await opened("viewer")
    await worker.enqueue([NewJob(id="a", task="task", lane="user:ann")])
    await worker.register(NewSession(id="w", kind=SessionKind.WORKER, queues=("default",), slots=Slots(total=10)))
    await look_around(store)
    await denied(store.enqueue([NewJob(id="b", task="task")]))
    await denied(store.enqueue([NewJob(id="b", task="task", unique="x")]))
    await denied(store.cancel(["a"]))
    await denied(store.claim("w", EVERYTHING))
    await denied(store.register(NewSession(id="v", kind=SessionKind.WAITER)))
    await denied(store.configure([SettingsChange(queue="default", declared=QueueSettings(limit=1), version=9)]))
    await denied(store.lead("v", lease=10))


async def test_a_producer_sends_jobs_and_gets_its_answers(opened: Open) -> None:
    worker, store = await opened("worker"), await opened("producer")
    [first] = await store.enqueue([NewJob(id="a", task="task", lane="user:ann", payload=b"[1]")])
    [again] = await store.enqueue([NewJob(id="a", task="task", lane="user:ann", payload=b"[1]")])
    assert (first.created, again.created) == (True, False)
    with pytest.raises(Conflict):
        await store.enqueue([NewJob(id="a", task="task", lane="user:ann", payload=b"[2]")])
    special = [NewJob(id="u", task="task", unique="x"), NewJob(id="s", task="task", sticky="key", queue="new")]
    assert len(await store.enqueue(special)) == 2
    assert await store.enqueue([NewJob(id="all", task="task", kind=JobKind.BROADCAST)])
    [position] = await store.positions(["a"])
    assert position is not None
    assert position.place == 1

    await run_one(worker, "a")
    [job] = await store.get(["a"])
    assert job is not None
    assert (job.state, job.result) == (JobState.COMPLETED, b'"done"')
    assert await store.cancel(["s"]) == [JobState.CANCELLED]


@pytest.mark.parametrize("kind", ["producer", "viewer"])
async def test_only_a_worker_has_to_do_with_tokens(opened: Open, kind: str) -> None:
    worker, store = await opened("worker"), await opened(kind)
    token = await worker.add_token(tokens.make("robot", ["admin"])[0])
    await denied(store.tokens())
    await denied(store.add_token(tokens.make("intruder", ["admin"])[0]))
    await denied(store.revoke_token(token.id))
    assert await worker.tokens() == [token]


async def test_a_producer_gets_its_jobs_in_when_others_hold_the_line(site: Site, url: str, opened: Open) -> None:
    store, admin = await opened("producer"), Database(parse(url))
    await store.enqueue([NewJob(id="first", task="task")])
    async with admin.transaction() as connection:
        await connection.execute(placed("SELECT fairlane.lock_alone()", SCHEMA))
        one = asyncio.create_task(store.enqueue([NewJob(id="a", task="task")]))
        await asyncio.sleep(0.2)
        two = asyncio.create_task(store.enqueue([NewJob(id="b", task="task"), NewJob(id="c", task="task")]))
        await asyncio.sleep(0.2)
    assert len([*await one, *await two]) == 3
    await admin.close()


async def test_a_producer_may_store_jobs_in_its_own_transaction(site: Site, opened: Open) -> None:
    store = await opened("producer")
    assert isinstance(store, PostgresqlStore)
    jobs = [NewJob(id="mine", task="task", queue="fresh")]
    await store.transactions.prepare(jobs)
    connection = await asyncpg.connect(as_role(site.url, site.role("producer")))
    async with connection.transaction():
        await store.transactions.enqueue_on(connection, jobs)
    await connection.close()

    assert await store.get(["mine"]) != [None]


async def test_the_error_of_a_rejected_producer_says_when_to_retry(opened: Open) -> None:
    worker, store = await opened("worker"), await opened("producer")
    small = [SettingsChange(queue="default", declared=QueueSettings(max_pending=1), version=1)]
    await worker.configure(small)
    await store.configure(small)  # what its code declares is so already
    await store.enqueue([NewJob(id="a", task="task")])
    await run_one(worker, "a")
    await store.enqueue([NewJob(id="b", task="task")])

    with pytest.raises(QueueFull):
        await store.enqueue([NewJob(id="c", task="task")])


async def test_a_producer_reads_no_other_payload_and_breaks_nothing(site: Site, opened: Open) -> None:
    worker, store = await opened("worker"), await opened("producer")
    await worker.enqueue([NewJob(id="a", task="task", payload=b'["secret"]', headers=b'{"h": "secret"}')])
    await worker.register(NewSession(id="w", kind=SessionKind.WORKER, queues=("default",), slots=Slots(total=10)))
    [job] = await store.get(["a"])
    assert job is not None
    assert (job.payload, job.headers) == (b"", None)
    await denied(store.find(Filter(queue="default")))
    await denied(store.claim("w", EVERYTHING))
    await denied(store.register(NewSession(id="v", kind=SessionKind.WORKER, slots=Slots(total=1))))
    await denied(store.configure([SettingsChange(queue="default", declared=QueueSettings(limit=1), version=9)]))

    database = Database(parse(site.url_of("producer")))
    place = quoted(SCHEMA)
    for sql in (
        f"SELECT payload FROM {place}.job",
        f"SELECT id FROM {place}.job",
        placed("SELECT * FROM fairlane.read_jobs(NULL, ARRAY[1::bigint])", SCHEMA),
        f"SELECT * FROM {place}.session",
        f"SELECT lane FROM {place}.flow",
        f"UPDATE {place}.active_job SET class = 0",
        f"DELETE FROM {place}.job",
        f"UPDATE {place}.queue SET paused = true",
        f"CREATE TABLE {place}.mine ()",
    ):
        await denied(database.execute(sql))
    await database.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_only_the_owner_changes_the_schema(site: Site, kind: str) -> None:
    database = Database(parse(site.url_of(kind)))
    place = quoted(SCHEMA)
    for sql in (
        f"CREATE TABLE {place}.mine ()",
        f"INSERT INTO {place}.migration VALUES (9001, 'mine', now(), 9001)",
        f"DELETE FROM {place}.migration",
        f"UPDATE {place}.library SET used_at = '-infinity'",
    ):
        await denied(database.execute(sql))
    with pytest.raises(StoreError, match="must be owner"):
        await database.execute(f"ALTER TABLE {place}.job ADD COLUMN mine text")
    await database.close()


async def test_a_role_without_grants_can_call_nothing(site: Site, url: str) -> None:
    admin, stranger = Database(parse(url)), Database(parse(site.url_of("stranger")))
    await denied(migrate(stranger))
    # Even with USAGE on the schema, the role does not get the owner's rights there.
    await admin.execute(f"GRANT USAGE ON SCHEMA {quoted(SCHEMA)} TO {site.role('stranger')}")
    rows = await admin.fetch(
        "SELECT oid::regprocedure::text AS name, has_function_privilege($1, oid, 'EXECUTE') AS may FROM pg_proc "
        "WHERE prosecdef AND pronamespace = to_regnamespace($2)",
        site.role("stranger"),
        quoted(SCHEMA),
    )
    assert {row["name"].split(".")[-1].split("(")[0] for row in rows} == set(map(library.versioned, LENT))
    assert not any(row["may"] for row in rows)
    await admin.close()
    await stranger.close()


async def test_what_is_called_from_outside_finds_its_names_in_the_catalog_alone(site: Site, url: str) -> None:
    admin = Database(parse(url))
    rows = await admin.fetch(
        "SELECT proname, proconfig FROM pg_proc WHERE pronamespace = to_regnamespace($1) "
        "AND (proconfig IS NOT NULL OR prosecdef)",
        quoted(SCHEMA),
    )
    await admin.close()

    assert {row["proname"] for row in rows} > set(map(library.versioned, LENT | {"exchange", "renew", "promote"}))
    for row in rows:
        assert "search_path=pg_catalog, pg_temp" in row["proconfig"], row["proname"]


async def test_a_producer_cannot_slip_in_a_function_of_its_own(site: Site, url: str, opened: Open) -> None:
    admin = Database(parse(url))
    role = site.role("producer")
    await admin.execute(f"CREATE SCHEMA {role} AUTHORIZATION {role}; CREATE TABLE {role}.caught (who text)")
    await admin.execute(f"GRANT ALL ON {role}.caught TO PUBLIC; GRANT USAGE ON SCHEMA {role} TO PUBLIC")
    evil = Database(parse(site.url_of("producer") + f"&search_path={role},pg_catalog"))
    for signature, type in (
        ("concat(VARIADIC text[])", "text"),
        ("nextval(regclass)", "bigint"),
        ("now()", "timestamptz"),
    ):
        await evil.execute(
            f"CREATE FUNCTION {role}.{signature} RETURNS {type} LANGUAGE plpgsql AS "
            f"$$ BEGIN INSERT INTO {role}.caught VALUES (current_user); RETURN NULL; END $$"
        )
    store = PostgresqlStore(parse(site.url_of("producer") + f"&search_path={role},pg_catalog"), None)
    await store.enqueue([NewJob(id="a", task="task", lane="user:ann"), NewJob(id="b", task="task")])
    await store.enqueue([NewJob(id="u", task="task", unique="x")])
    await store.cancel(["a"])
    await store.close()
    caught = await admin.fetch(f"SELECT * FROM {role}.caught WHERE who <> '{role}'")
    await evil.close()
    await admin.close()

    assert caught == []


async def test_tables_of_later_migrations_are_the_workers_too(site: Site) -> None:
    owner, worker = Database(parse(site.url_of("owner"))), Database(parse(site.url_of("worker")))
    await owner.execute(f"CREATE TABLE {quoted(SCHEMA)}.later (id bigint GENERATED BY DEFAULT AS IDENTITY)")
    try:
        await worker.execute(f"INSERT INTO {quoted(SCHEMA)}.later DEFAULT VALUES")
    finally:
        await owner.execute(f"DROP TABLE {quoted(SCHEMA)}.later")
    await owner.close()
    await worker.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_the_same_statements(kind: str) -> None:
    assert load_queries(PACKAGE)[f"grant_{kind}"] in PAGE.read_text()


def test_names_in_grants_are_quoted() -> None:
    text = grants("viewer", 'we"b', "Jobs")

    assert 'GRANT USAGE ON SCHEMA "Jobs" TO "we""b";' in text
    assert "fairlane" not in text
