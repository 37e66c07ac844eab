"""How PostgreSQL carries out what is asked of it: by which index, and never by looking at every job there is.

Plans hang on statistics as much as on the text of a statement, and functions keep them for as long as a connection
lives. So each rule is tested without statistics, with fresh ones, with such that are out of date, and with plans that
were made while the store was nearly empty: each time on a hundred thousand jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pprint import pformat
from typing import Any

import pytest

from fairlane.model.job import JobState
from fairlane.model.listings import LineCursor
from fairlane.model.reading import LANES_LOOKED_AT, Filter
from fairlane.store.positions import MOST_COUNTED
from fairlane.store.postgresql import ended, lane_order, positions, reading
from fairlane.store.postgresql.address import driver
from fairlane.store.postgresql.statements import queries
from tests.servers import installation
from tests.servers.postgresql import server

from ..explained import Plan, plans
from ..lopsided_postgresql import RUNNING, fill, last_ended

JOBS = 100_000
FEW = 200
PAGE = 50
NONE, FRESH, LITTLE, KEPT = "none", "fresh", "from when there was little", "plans from when there was little"
SERVERS = [name for name in ("wheel", "system") if getattr(installation, name)() is not None] or ["any"]
TABLES = frozenset(
    (
        "job",
        "job_link",
        "active_job",
        "job_extra",
        "outcome",
        "progress",
        "attempt",
        "flow",
        "lane",
        "domain",
        "binding",
        "session",
        "held_unique",
    )
)
"""Tables that grow with the work there is, or was."""

ENDED = last_ended(JOBS)
FIRST_WAITING = ENDED + 2 * RUNNING + 1
Read = Callable[[reading.View], Awaitable[object]]


def _page(**fields: Any) -> Read:
    return lambda view: reading.find(view, Filter(**fields), PAGE, None)


def _standing(*numbers: int) -> Read:
    return lambda view: positions.read_positions(view, [f"job-{number}" for number in numbers])


def _line(lane: str | None, cursor: str | None = None) -> Read:
    return lambda view: lane_order.lane_line(view, "crowd", lane, PAGE, LineCursor.read(cursor))


def _ended(since: float) -> Read:
    cursor = ended.EndedCursor(ended.Snapshot(since, 0, 1, since, 0)).text
    return lambda view: ended.read_ended(view, cursor, PAGE)


PAGES: dict[str, tuple[Read, set[str]]] = {
    "everything": (_page(), {"job_pkey"}),
    "a queue whose jobs are all old": (_page(queue="calm"), {"job_task"}),
    "a queue with nearly everything": (_page(queue="crowd"), {"job_task"}),
    "a task": (_page(task="rare"), {"job_task"}),
    "a lane": (_page(queue="calm", lane="quiet"), {"job_lane"}),
    "a long lane": (_page(queue="crowd", lane="bulk"), {"job_lane"}),
    "a sticky key": (_page(sticky="key-1"), {"job_link_pkey"}),
    "an error group": (_page(error_group="broken"), {"outcome_error"}),
    "a worker": (
        _page(worker="default/7"),
        {"job_extra_inbox", "active_job_pkey", "active_job_running", "outcome_session"},
    ),
    "a busy worker": (
        _page(worker="default/1"),
        {"job_extra_inbox", "active_job_pkey", "active_job_running", "outcome_session"},
    ),
    "scheduled": (_page(state=JobState.SCHEDULED), {"job_extra_later"}),
    "pending": (_page(state=JobState.PENDING), {"active_job_pkey"}),
    "running": (_page(state=JobState.RUNNING), {"active_job_running", "job_extra_gated"}),
    "completed": (_page(state=JobState.COMPLETED), {"outcome_pkey"}),
    "failed": (_page(state=JobState.FAILED), {"outcome_state"}),
    "cancelled": (_page(state=JobState.CANCELLED), {"outcome_state"}),
}
"""The filters of a page, and the indexes that they must use."""
SORTED_BY_HAND = {
    "running": "what runs is at most what the fleet has slots for",
    "a worker": "what waits for it, runs there and ended there are three lists",
    "a busy worker": "likewise",
    "a task": "each queue has a list of its own",
    "a queue whose jobs are all old": "each task has a list of its own",
    "a queue with nearly everything": "likewise",
}
MAY_WALK = {
    "active_job_running": "what runs is at most what the fleet has slots for",
    "active_job_arriving": "what is stored and not admitted yet is at most that of the last second",
    "session_pkey": "lists every session",
    "queue_pkey": "there are few queues",
    "binding_worker": "lists every open binding, for a person",
    "binding_closed": "newest first: a few, and stop",
}
"""Indexes that may be read without a condition, each with the reason."""

OTHERS: dict[str, Read] = {
    "one job": lambda view: reading.get(view, [f"job-{JOBS}"]),
    "many jobs": lambda view: reading.get(view, [f"job-{number}" for number in range(1, JOBS, JOBS // 300)]),
    "where the next job stands": _standing(FIRST_WAITING),
    "where the last job stands": _standing(JOBS),
    "where the last of a long lane stands": _standing(JOBS - 2),
    "where a scheduled job stands": _standing(ENDED + RUNNING + 1),
    "where many stand": _standing(*range(ENDED, JOBS, (JOBS - ENDED) // 20)),
    "the longest lanes": lambda view: reading.lanes(view, "crowd", 100),
    "lanes of a calm queue": lambda view: reading.lanes(view, "calm", 100),
    "the line of a long lane": _line("bulk"),
    "a later page of it": _line("bulk", f"w_1.0_{JOBS - 200}_100"),
    "the line without a lane": _line(None),
    "the line of one lane of many": _line("user:101"),
    "failures": lambda view: view.all("read_failures", None, None, 50, FAILURES, 2_000),
    "failures of a queue": lambda view: view.all("read_failures", "calm", "rare", 50, FAILURES, 2_000),
    "ended jobs": _ended(0.0),
    "ended jobs, none of them new": _ended(1e9),
    "queues": reading.queues,
    "sessions": reading.sessions,
    "one session": lambda view: reading.session(view, "worker"),
    "bindings": lambda view: reading.bindings(view, None, None, PAGE),
    "bindings of a pool": lambda view: reading.bindings(view, "default", None, PAGE),
    "bindings of a key": lambda view: reading.bindings(view, None, "key-100", PAGE),
}
FAILURES = 100
A_PAGE = 6 * (PAGE + 1)
"""Rows of tables that a page may look at: a job is in a handful of them."""
SAMPLED = 200 * 70
"""Rows on the pages that are looked at where a place is not counted to the end (`read_likely`)."""
A_STANDING = 2 * positions.MOST_PLACES + MOST_COUNTED + SAMPLED
"""The same for where a job stands: its place and its lane are counted only so far, and so are the other lanes."""
A_LOOK_AT_LANES = 150 * 70 + 2 * 30 * 70 + 2 * 5_000 + 6 * RUNNING
"""The same for lanes: jobs on 150 pages, a fifth with their identities, so many that are counted, and what runs."""
A_LOOK_AT_QUEUES = A_PAGE + LANES_LOOKED_AT
"""The same for queues: also the first job of each lane that is looked at, for the oldest wait."""
A_LINE = 8 * (PAGE + 1) + 6 * RUNNING
"""The same for a page of a lane's line: its jobs, by each of the lists that they may be in, and what runs."""
MOST_ROWS = {
    "one job": 10,
    "many jobs": 6 * 300,
    "the longest lanes": A_LOOK_AT_LANES,
    "queues": A_LOOK_AT_QUEUES,
    "failures": 4 * FAILURES,
    "failures of a queue": 4 * FAILURES,
    "the line of a long lane": A_LINE,
    "a later page of it": A_LINE,
    "the line without a lane": A_LINE,
    "the line of one lane of many": A_LINE,
} | {name: A_STANDING * (20 if "many" in name else 1) for name in OTHERS if name.startswith("where")}

Collected = dict[str, dict[str, list[Plan]]]


@pytest.fixture(scope="module", params=SERVERS)
def collected(request: pytest.FixtureRequest) -> Iterator[Collected]:
    """The plans of every reading, by the statistics and by what was read."""
    given = server(request.param)
    urls = [given.fresh_database() for _ in range(2)]
    yield asyncio.run(_collect(*urls))
    for url in urls:
        given.done(url)


async def _collect(bare: str, grown: str) -> Collected:
    found: Collected = {}
    connection = await _connect(bare)
    await _begin(connection)
    await fill(connection, JOBS)
    found[NONE] = await _plans_of_all(connection)
    await connection.close()

    old = await _connect(grown)
    await _begin(old)
    await fill(old, FEW)
    await old.execute("ANALYZE")
    # Often enough for the planner to switch to a generic plan.
    for _ in range(6):
        await _read_all(old)
    young = await _connect(grown)
    await fill(young, JOBS)
    found[KEPT] = await _plans_of_all(old)
    found[LITTLE] = await _plans_of_all(young)
    await young.execute("ANALYZE")
    await young.close()
    young = await _connect(grown)
    found[FRESH] = await _plans_of_all(young)
    await young.close()
    await old.close()
    return found


async def _connect(url: str) -> Any:
    return await driver().connect(url)


async def _begin(connection: Any) -> None:
    """As in a new database: in one that was emptied, an index is as long as an earlier test has made it."""
    await connection.execute("REINDEX SCHEMA fairlane")


def _view(connection: Any) -> reading.View:
    return reading.View(connection, queries("fairlane"), None, None)


def _readings() -> Iterator[tuple[str, Read]]:
    yield from ((name, read) for name, (read, _) in PAGES.items())
    yield from OTHERS.items()


async def _read_all(connection: Any) -> None:
    for name, read in _readings():
        if name != "one session":
            await read(_view(connection))


async def _plans_of_all(connection: Any) -> dict[str, list[Plan]]:
    return {name: await _plans_of(connection, read) for name, read in _readings()}


async def _plans_of(connection: Any, read: Read) -> list[Plan]:
    return await plans(connection, lambda: read(_view(connection)))


def _windows(found: list[Plan]) -> list[Plan]:
    """The statements that look for the jobs of a page, without those that then read them."""
    return [plan for plan in found if "LIMIT p_size" in plan.text]


@pytest.mark.parametrize("statistics", [NONE, FRESH, LITTLE, KEPT])
class TestReading:
    def test_the_plans_were_seen(self, collected: Collected, statistics: str) -> None:
        # The rules below say nothing about a reading whose plans were not collected.
        assert collected[statistics].keys() == {name for name, _ in _readings()}
        for name, found in collected[statistics].items():
            assert any(node.index for plan in found for node in plan.nodes), name

    def test_no_table_of_jobs_is_read_from_end_to_end(self, collected: Collected, statistics: str) -> None:
        scans = {
            name: scanned
            for name, found in collected[statistics].items()
            if (scanned := {table for plan in found for table in plan.scanned & TABLES})
        }
        assert not scans, pformat(scans)

    def test_no_index_is_read_from_end_to_end_without_a_reason(self, collected: Collected, statistics: str) -> None:
        walks = {
            name: walked
            for name, found in collected[statistics].items()
            if (walked := {index for plan in found for index in plan.walked} - MAY_WALK.keys())
        }
        assert not walks, pformat(walks)

    @pytest.mark.parametrize("page", PAGES)
    def test_each_filter_of_a_page_has_its_index(self, collected: Collected, statistics: str, page: str) -> None:
        _, indexes = PAGES[page]
        [window] = _windows(collected[statistics][page])
        assert indexes <= window.indexes <= indexes | {"session_place", "queue_pkey"}
        # One more than the page, at most from each of three lists; no rows are read in vain.
        assert window.rows <= 3 * (PAGE + 1) + 2 * RUNNING

    def test_pages_come_in_the_order_of_the_index(self, collected: Collected, statistics: str) -> None:
        sorting = {
            page: window
            for page in PAGES.keys() - SORTED_BY_HAND.keys()
            for window in _windows(collected[statistics][page])
            if window.sorts
        }
        assert not sorting, pformat(sorting)

    def test_no_call_looks_at_more_than_it_must(self, collected: Collected, statistics: str) -> None:
        looked = {name: sum(plan.rows for plan in found) for name, found in collected[statistics].items()}
        too_much = {name: rows for name, rows in looked.items() if rows > MOST_ROWS.get(name, A_PAGE)}
        assert not too_much, pformat(too_much)


def test_every_permitted_walk_is_needed(collected: Collected) -> None:
    # An exception that is not needed would hide the next mistake.
    walked = {
        index for each in collected.values() for found in each.values() for plan in found for index in plan.walked
    }
    assert MAY_WALK.keys() - walked == set()
