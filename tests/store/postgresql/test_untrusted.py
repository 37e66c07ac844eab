"""Jobs that a producer sends by SQL are checked in the functions: such a role cannot affect other users."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import pytest

from fairlane.model.job import NewJob
from fairlane.store import open_store
from fairlane.store.postgresql.address import driver, parse
from fairlane.store.postgresql.database import Database
from fairlane.store.postgresql.statements import placed, quoted
from tests.servers.postgresql import server

from ..postgresql_urls import as_role
from .test_roles import SCHEMA, Site

pytestmark = pytest.mark.anyio
asyncpg = driver()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A schema with its roles, and one queue with a job."""
    url = server().fresh_database(migrated=False)
    made = Site(url)

    async def with_admin(work: Callable[[Database], Awaitable[None]]) -> None:
        admin = Database(parse(url))
        await work(admin)
        await admin.close()

    async def fill(admin: Database) -> None:
        store = await open_store(made.url_of("worker"))
        await store.enqueue([NewJob(id="first", task="task")])
        await store.close()

    asyncio.run(with_admin(made.make))
    asyncio.run(with_admin(fill))
    yield made
    asyncio.run(with_admin(made.remove))
    server().done(url)


EVIL = {
    "backoff": (r"p_backoff => '\xff'::bytea", "backoff"),
    "negative backoff": ("p_backoff => '{\"base\": -1}'::bytea", "backoff"),
    "endless backoff": ("p_backoff => '{\"factor\": 1e300}'::bytea", "backoff"),
    "class": ("p_class => 7::smallint", "class"),
    "negative class": ("p_class => (-1)::smallint", "class"),
    "no class": ("p_class => NULL", "class"),
    "cost": ("p_cost => 'NaN'", "cost"),
    "endless cost": ("p_cost => 'infinity'", "cost"),
    "timeout": ("p_timeout => 'NaN'", "timeout"),
    "negative timeout": ("p_timeout => -1", "timeout"),
    "expires": ("p_expires => '-infinity'", "expires"),
    "retries": ("p_retries => -1", "retries"),
    "headers": ("p_headers => decode(repeat('20', 16385), 'hex')", "headers"),
    "pool": ("p_pool => ''", "pool"),
    "lane": ("p_lane => E'a\\nb'", "lane"),
    "empty lane": ("p_lane => ''", "lane"),
    "now": ("p_now => 99999999999", "now"),
    "lease": ("p_lease => 99999999999", "now"),
}


@pytest.mark.parametrize("what", EVIL)
async def test_a_producer_cannot_store_what_no_client_would_send(site: Site, what: str) -> None:
    argument, field = EVIL[what]
    await refused(
        site, f"SELECT fairlane.enqueue_one('evil', 'x', 'default', '[[],{{}}]'::bytea, 'any', {argument})", field
    )


JOBS = (
    "ARRAY['evil'], ARRAY['{task}'], ARRAY['{queue}'], ARRAY['[[],{{}}]'::bytea], NULL, {classes}, {costs}, {delays},"
    " {run_ats}"
)
REST = "NULL, NULL, NULL, NULL, NULL, NULL, NULL"
USUAL = {"task": "x", "queue": "default", "classes": "NULL", "costs": "NULL", "delays": "NULL", "run_ats": "NULL"}
ANY = "{kinds}, NULL, {unique_fors}, {stickies}, NULL, NULL, {ttls}, {crons}, NULL"
USUAL_ANY = {"kinds": "NULL", "unique_fors": "NULL", "stickies": "NULL", "ttls": "NULL", "crons": "NULL"}


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("task", {"task": "no name"}),
        ("queue", {"queue": "no\nname"}),
        ("class", {"classes": "ARRAY[9::smallint]"}),
        ("cost", {"costs": "ARRAY['NaN'::float8]"}),
        ("delay", {"delays": "ARRAY['infinity'::float8]"}),
        ("run_at", {"run_ats": "ARRAY[-1::float8]"}),
    ],
)
async def test_nor_by_a_batch(site: Site, field: str, change: dict[str, str]) -> None:
    jobs = JOBS.format(**USUAL | change)
    await refused(site, f"SELECT fairlane.enqueue({jobs}, {REST}, '2s')", field)
    await refused(site, f"SELECT fairlane.enqueue_any({jobs}, {REST}, {ANY.format(**USUAL_ANY)})", field)


async def test_nor_by_a_batch_that_takes_the_numbers_of_the_next(site: Site) -> None:
    many = "ARRAY(SELECT 'evil-' || g FROM generate_series(1, 1001) g)"
    payloads = "ARRAY(SELECT '[[],{}]'::bytea FROM generate_series(1, 1001) g)"
    usual = f"NULL, NULL, NULL, NULL, NULL, {REST}, '2s'"
    call = f"SELECT fairlane.enqueue({many}, ARRAY['x'], ARRAY['default'], {payloads}, {usual})"
    await refused(site, call, "jobs")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("kind", {"kinds": "ARRAY[1::smallint]"}),
        ("kind", {"kinds": "ARRAY[9::smallint]"}),
        ("cron", {"crons": "ARRAY['nightly']"}),
        ("ttl", {"kinds": "ARRAY[2::smallint]", "ttls": "ARRAY['NaN'::float8]"}),
        ("sticky", {"stickies": "ARRAY['']"}),
        ("unique_for", {"unique_fors": "ARRAY[-1::float8]"}),
    ],
)
async def test_nor_of_a_kind_that_is_not_his(site: Site, field: str, change: dict[str, str]) -> None:
    call = f"SELECT fairlane.enqueue_any({JOBS.format(**USUAL)}, {REST}, {ANY.format(**USUAL_ANY | change)})"
    await refused(site, call, field)


async def test_nor_in_a_transaction_of_its_own(site: Site) -> None:
    connection = await asyncpg.connect(as_role(site.url, site.role("producer")))
    schema, insert = quoted(SCHEMA), placed("SELECT fairlane.insert_arriving($1)", SCHEMA)
    number = await connection.fetchval(f"SELECT id FROM {schema}.queue WHERE name = 'default'")
    job = {
        "id": "evil", "task": "x", "queue": "default", "number": number, "cost": 1, "retries": 3, "class": 1,
        "pool": "default", "payload": "[[],{}]",
    }  # fmt: skip
    database = site.url.rpartition("/")[2]
    for field, change in {"cost": {"cost": "NaN"}, "backoff": {"backoff": "[]"}, "unique": {"unique": "a\nb"}}.items():
        request = msgspec.json.encode({"database": database, "jobs": [job | change]}).decode()
        answer = msgspec.json.decode(await connection.fetchval(insert, request))
        assert (answer["code"], answer["detail"]) == ("FL008", field)
    request = msgspec.json.encode({"database": database, "now": 9e9, "jobs": [job]}).decode()
    with pytest.raises(asyncpg.PostgresError) as caught:
        await connection.fetchval(insert, request)
    assert caught.value.detail == "now"
    with pytest.raises(asyncpg.CheckViolationError):
        await connection.execute(f"INSERT INTO {schema}.queue (name) VALUES (E'two\\nlines')")
    await connection.close()


async def refused(site: Site, call: str, field: str) -> None:
    """Run it as the producer: the rejection names the field, and nothing is stored."""
    connection = await asyncpg.connect(as_role(site.url, site.role("producer")))
    with pytest.raises(asyncpg.PostgresError) as caught:
        await connection.fetchval(placed(call, SCHEMA))
    await connection.close()
    assert (caught.value.sqlstate, caught.value.detail) == ("FL008", field), str(caught.value)
    admin = await asyncpg.connect(site.url)
    assert not await admin.fetchval(f"SELECT count(*) FROM {quoted(SCHEMA)}.job WHERE id LIKE 'evil%'")
    await admin.close()
