"""How SQLite carries out each named query: by which index, and never by looking at every job there is.

Plans hang on statistics as much as on the text of a query, and ANALYZE may be run on the file at any time. So
each rule is tested without statistics, with those of a small and lopsided store, and with such that are long out of
date.
"""

from __future__ import annotations

import ast
import asyncio
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from pprint import pformat
from shutil import copyfile

import pytest

import fairlane.store.sqlite
from fairlane.store.sqlite import database
from fairlane.store.sqlite.records import SQL
from fairlane.store.sqlite.store import SqliteStore

from ..lopsided import fill

SOURCE = Path(fairlane.store.sqlite.__file__).parent
STATISTICS = ("none", "fresh", "from when there was little", "from when there was much")
STATEMENT = re.compile(r"(SELECT|INSERT|UPDATE|DELETE|WITH)\b")
ALIAS = re.compile(r"\b(?:FROM|JOIN|UPDATE)\s+(fairlane_\w+)(?:\s+(?!SET|ON|WHERE|CROSS|LEFT|JOIN|ORDER|GROUP)(\w+))?")
SCAN = re.compile(r"^SCAN (\w+)")
WALK = re.compile(r"^SEARCH (\w+) USING INTEGER PRIMARY KEY \(rowid[<>]\?\)")
"""A search that begins somewhere and then goes through all the rest."""
INDEX = re.compile(r"USING (?:COVERING )?INDEX (\w+)")
TABLES = frozenset(
    f"fairlane_{name}" for name in ("job", "active_job", "outcome", "flow", "lane", "domain", "binding", "session")
)
"""What grows with the work there is, or was."""

MAY_SCAN = {
    # Readers of a page take a few rows and stop.
    "find_all": "every job matches, newest first",
    "find_completed": "nearly every finished job matches, newest first",
    "find_pending": "nearly every live job matches, newest first",
    # Readers of everything there is.
    "sessions_read": "lists every session",
    "task_sets": "goes with the list of every session",
    "bindings_open": "lists every open binding, for a person",
    # Changing settings looks at every job of a queue, and is rare.
    "unlimited_lanes_of_queue": "a change of settings",
    # Passes in the background, each over records that are few beside the jobs.
    "lanes_with_room": "the admitter: only lanes with a free place are in the index",
    "bindings_unserved": "the rescuer: only open bindings are in the index",
    "domains_idle": "the pruner: lanes that were used lately",
    "flows_tidy": "the pruner: lanes that were used lately",
    # A recount counts everything; that is its purpose.
    "active_job_count": "recount",
    "true_queue_count": "recount",
    "queue_count_differences": "recount",
    "queue_count_recount": "recount",
    "lane_differences": "recount",
    "lanes_short": "recount",
    "lanes_dangling": "recount",
    "flow_differences": "recount",
    "identities_missing": "recount, and a promotion that finds nothing of what is due",
}
"""Queries that may look at every row of a table, each with the reason."""

ROWID = "INTEGER PRIMARY KEY (rowid=?)"
HOT: dict[str, tuple[str, ...]] = {
    # claim
    "domain_get": ("sqlite_autoindex_fairlane_domain_1 (inbox=? AND class=? AND queue=?)",),
    "flows_next": (
        "fairlane_flow_next (domain=? AND tag>?)",
        "fairlane_active_job_ready (flow=? AND arrival=?)",
        "fairlane_active_job_ready (flow=? AND arrival>?)",
        ROWID,
    ),
    "flow_jobs": ("fairlane_active_job_ready (flow=? AND arrival>?)", ROWID),
    "active_job_start": (ROWID,),
    "flow_started": (ROWID,),
    "session_by_id": ("sqlite_autoindex_fairlane_session_1 (id=?)",),
    "session_load": ("fairlane_active_job_running (session=?)",),
    # finish
    "held_rows": (ROWID,),
    "outcome_insert": (),
    "outcome_complete": (ROWID,),
    "active_job_delete": (ROWID,),
    "active_job_delete_all": (ROWID,),
    "active_job_grant": (ROWID,),
    "lane_next": ("fairlane_active_job_waiting (lane=?)",),
    "lanes_with_next": (
        ROWID,
        "fairlane_active_job_waiting (lane=?)",
        "sqlite_autoindex_fairlane_domain_1 (inbox=? AND class=? AND queue=?)",
        "sqlite_autoindex_fairlane_flow_1 (domain=? AND lane=?)",
    ),
    "lane_occupied": ("fairlane_active_job_waiting (lane=?)",),
    "queue_count_add": ("PRIMARY KEY (queue=? AND class=?)",),
    # enqueue
    "jobs_known": ("sqlite_autoindex_fairlane_job_1 (id=?)", ROWID),
    "reserved_ids": ("PRIMARY KEY (id=?)",),
    "job_insert": (),
    "active_job_insert": (),
    "flow_get": ("sqlite_autoindex_fairlane_flow_1 (domain=? AND lane=?)",),
    "flow_head": ("fairlane_active_job_ready (flow=?)",),
    "lane_by_key": ("sqlite_autoindex_fairlane_lane_1 (queue=? AND key=?)",),
    "unique_get": ("PRIMARY KEY (task=? AND value=?)", ROWID),
    "binding_open": ("fairlane_binding_open (pool=? AND key=?)",),
    # time
    "records_due": ("fairlane_active_job_due (class=? AND due<?)",),
    "seqs_expired": ("fairlane_active_job_expiry (expires_at<?)",),
    "next_due_times": ("fairlane_active_job_due (class=? AND due>?)", "fairlane_active_job_expiry (expires_at>?)"),
    "grants_idle": ("fairlane_active_job_holding (granted_at<?)",),
    "grants_idle_count": ("fairlane_active_job_holding (granted_at<?)",),
    # pages
    "find_error": ("fairlane_outcome_error (error_group=? AND seq<?)",),
    "find_session": ("fairlane_outcome_session (session=? AND seq<?)",),
    "find_inbox": ("fairlane_active_job_inbox (inbox=? AND seq<?)",),
    "find_sticky": ("fairlane_job_sticky (sticky=? AND seq<?)",),
    "find_lane": ("fairlane_job_lane (queue=? AND lane=? AND seq<?)",),
    "find_task": ("fairlane_job_task (task=? AND seq<?)",),
    "find_queue": ("fairlane_job_queue (queue=? AND seq<?)",),
    "ended_after": ("fairlane_outcome_ending (ending>?)", ROWID, ROWID),
    "find_failed": ("fairlane_outcome_state (state=? AND seq<?)",),
    "find_cancelled": ("fairlane_outcome_state (state=? AND seq<?)",),
    "find_scheduled": ("fairlane_active_job_later (seq<?)",),
    "find_completed": ("INTEGER PRIMARY KEY (rowid<?)",),
    "find_pending": ("INTEGER PRIMARY KEY (rowid<?)",),
    "find_all": ("INTEGER PRIMARY KEY (rowid<?)",),
}
"""What is called all the time, or with everything in the table: the searches that each must consist of."""
SORTED_BY_HAND = {
    "find_running": "what runs is at most what the fleet has slots for",
    "find_session_active": "what one worker runs is at most its slots",
}


def statements() -> Iterator[str]:
    """The names of all queries that are more than a part of others."""
    return (name for name, text in SQL.items() if STATEMENT.match(text))


def plan(connection: sqlite3.Connection, name: str) -> list[str]:
    """The steps of a query."""
    text = SQL[name]
    numbered = [int(number) for number in re.findall(r"\?(\d+)", text)]
    values = [7] * (max(numbered) if numbered else text.count("?"))
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {text}", values)]


def scanned(connection: sqlite3.Connection, name: str) -> set[str]:
    """The tables of which a query looks at every row, or at every row from somewhere on."""
    aliases = {alias or table: table for table, alias in ALIAS.findall(SQL[name])}
    matches = [SCAN.match(step) or WALK.match(step) for step in plan(connection, name)]
    names = [str(match[1]) for match in matches if match]
    return {table for name in names if (table := aliases.get(name, name)) in TABLES}


@pytest.fixture(scope="module")
def lopsided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which one lane has nearly everything."""
    path = tmp_path_factory.mktemp("plans") / "lopsided.db"
    asyncio.run(fill(path, jobs=400))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a few of everything."""
    path = tmp_path_factory.mktemp("plans") / "small.db"
    asyncio.run(fill(path, jobs=2))
    return path


@pytest.fixture(params=STATISTICS)
def connection(
    request: pytest.FixtureRequest, tmp_path: Path, lopsided: Path, small: Path
) -> Iterator[sqlite3.Connection]:
    """A connection of the store's own to the lopsided file, with statistics of one kind in it."""
    path = tmp_path / "analyzed.db"
    copyfile(lopsided, path)
    leave_statistics(path, request.param, small)

    async def pass_by() -> None:
        await (await SqliteStore.open(f"sqlite:///{path}")).close()

    asyncio.run(pass_by())
    opened = database.open_for_writing(path)
    yield opened
    opened.close()


def leave_statistics(path: Path, kind: str, small: Path) -> None:
    """Run ANALYZE on a file, as any program may, and let the file grow afterwards."""
    if kind == "none":
        return
    stranger = sqlite3.connect(path)
    stranger.execute("ANALYZE")
    if kind == "from when there was little":
        stranger.execute("ATTACH ? AS small", (str(small),))
        stranger.execute("ANALYZE small")
        stranger.execute("DELETE FROM sqlite_stat1")
        stranger.execute("INSERT INTO sqlite_stat1 SELECT * FROM small.sqlite_stat1")
    if kind == "from when there was much":
        for rowid, stat in stranger.execute("SELECT rowid, stat FROM sqlite_stat1").fetchall():
            # A thousand times as many jobs, in no more lanes, queues and sessions than now.
            many = " ".join(str(int(word) * 1000) if word.isdigit() else word for word in stat.split())
            stranger.execute("UPDATE sqlite_stat1 SET stat = ? WHERE rowid = ?", (many, rowid))
    # The statistics would prove nothing if ANALYZE had found nothing.
    assert {table for (table,) in stranger.execute("SELECT DISTINCT tbl FROM sqlite_stat1")} >= TABLES
    stranger.commit()
    stranger.close()


def test_no_query_looks_at_every_row_without_a_reason(connection: sqlite3.Connection) -> None:
    scans = {name: found for name in statements() if name not in MAY_SCAN and (found := scanned(connection, name))}
    assert not scans, pformat(scans)


def test_the_hot_queries_consist_of_the_searches_that_they_were_made_for(connection: sqlite3.Connection) -> None:
    others = {}
    for name, expected in HOT.items():
        steps = plan(connection, name)
        missing = [
            search for search in expected if not any(step.endswith(search) or f"{search} " in step for step in steps)
        ]
        if missing or (not expected and steps):
            others[name] = steps
    assert not others, pformat(others)


def test_the_hot_queries_sort_nothing(connection: sqlite3.Connection) -> None:
    names = {name for name in statements() if name in HOT or name.startswith("find_")} - SORTED_BY_HAND.keys()
    assert [name for name in names if any("TEMP B-TREE" in step for step in plan(connection, name))] == []


def test_every_permitted_scan_is_needed(lopsided: Path) -> None:
    # An exception that is not needed would hide the next mistake.
    opened = sqlite3.connect(lopsided)
    assert [name for name in MAY_SCAN if not scanned(opened, name)] == []
    opened.close()


def test_every_index_serves_a_query_or_a_rule(lopsided: Path) -> None:
    opened = sqlite3.connect(lopsided)
    used = {match[1] for name in statements() for step in plan(opened, name) if (match := INDEX.search(step))}
    rows = opened.execute(
        "SELECT i.name FROM sqlite_schema t JOIN pragma_index_list(t.name) i WHERE t.type = 'table' AND NOT i.[unique]"
    ).fetchall()
    opened.close()
    assert sorted({name for (name,) in rows} - used) == []


# -- names -------------------------------------------------------------------------------------------------------


def trees() -> Iterator[ast.Module]:
    """The store's modules."""
    return (ast.parse(path.read_text()) for path in SOURCE.rglob("*.py"))


def asked_for(tree: ast.Module) -> Iterator[ast.expr]:
    """Where a module names a query: `step.one(…)` and the like, and `SQL[…]`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("one", "all", "run", "many"):
                yield node.args[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "SQL":
            yield node.slice


def pattern_of(text: ast.JoinedStr) -> str:
    """What a name that is put together may look like."""
    return "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"\w+" for part in text.values)


def test_every_query_that_is_asked_for_exists() -> None:
    wanted: set[str] = set()
    for tree in trees():
        for node in asked_for(tree):
            if isinstance(node, ast.Constant):
                wanted.add(str(node.value))
            elif isinstance(node, ast.JoinedStr):
                assert any(re.fullmatch(pattern_of(node), name) for name in SQL), ast.unparse(node)
    assert len(wanted) > 100
    assert wanted - SQL.keys() == set()


def test_every_query_is_asked_for() -> None:
    texts = "".join(path.read_text() for path in SOURCE.rglob("*.sql"))
    words: set[str] = set(re.findall(r"/\*(\w+)\*/", texts))
    patterns: list[str] = []
    for tree in trees():
        # Names also go through variables, so any text in the code that is one counts.
        words |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        patterns += [pattern_of(node) for node in asked_for(tree) if isinstance(node, ast.JoinedStr)]
    unused = SQL.keys() - words
    assert sorted(name for name in unused if not any(re.fullmatch(p, name) for p in patterns)) == []
