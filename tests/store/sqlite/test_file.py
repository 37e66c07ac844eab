"""The file: how it is named, made, migrated, shared and refused."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fairlane.errors import InvalidInput, SchemaMismatch, StoreUnavailable
from fairlane.model.job import NewJob
from fairlane.store import open_store
from fairlane.store.sqlite import database
from fairlane.store.sqlite.database import path_of
from fairlane.store.sqlite.store import SqliteStore

from ..schema_dump import COMMITTED, dump, fresh_dump

pytestmark = pytest.mark.anyio

OPEN = """
import asyncio, sys
from fairlane.store.sqlite.store import SqliteStore

async def main():
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    sys.stdin.readline()
    store = await SqliteStore.open(sys.argv[1])
    sys.stdout.write(f"{await store.migrate()}\\n")
    await store.close()

asyncio.run(main())
"""
"""Opens a store when it gets a line, and prints the version of the schema."""

WRITE_AS_NOBODY = """
import asyncio, os, sys
from fairlane.store.sqlite.store import SqliteStore
from fairlane.errors import FairlaneError
from fairlane.model.job import NewJob

async def main():
    # Permissions do not bind root. All imports are done before: their files may not be readable for another user.
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    try:
        store = await SqliteStore.open(sys.argv[1])
        try:
            await store.enqueue([NewJob(id="a", task="task")])
        finally:
            await store.close()
    except FairlaneError as exc:
        sys.stdout.write(f"{type(exc).__name__}: {exc}")

asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fairlane.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
def public(tmp_path: Path) -> Iterator[Path]:
    """A folder that other users can reach; pytest's own are private."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)
        Path(folder).chmod(0o777)


async def make(url: str, *ids: str) -> None:
    """A store with a few jobs, closed again."""
    store = await SqliteStore.open(url)
    await store.enqueue([NewJob(id=id, task="task") for id in ids])
    await store.close()


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Another process."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# -- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:////var/lib/jobs.db", Path("/var/lib/jobs.db")),
        ("sqlite:///jobs.db", Path("jobs.db").absolute()),
        ("sqlite:///data/jobs.db", Path("data/jobs.db").absolute()),
        ("sqlite:////tmp/a%20b%23c.db", Path("/tmp/a b#c.db")),
    ],
)
def test_a_url_names_a_file(url: str, path: Path) -> None:
    assert path_of(url) == path


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:",
        "sqlite://",
        "sqlite:///",
        "sqlite://jobs.db",
        "sqlite:///:memory:",
        "sqlite:////tmp/jobs.db?mode=ro",
        "mysql://localhost/jobs",
        "jobs.db",
        "",
    ],
)
async def test_a_url_that_names_no_file_of_ours_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"sqlite:///|plain file") as refusal:
        await open_store(url)
    assert refusal.value.field == "url"


ACCENTED = "d\N{LATIN SMALL LETTER E WITH ACUTE}j\N{LATIN SMALL LETTER A WITH GRAVE}.db"


@pytest.mark.parametrize("name", ["a b.db", "a#b.db", "a%41.db", "a&b=c.db", "a'b\".db", ACCENTED, "no-suffix"])
async def test_a_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    store = await SqliteStore.open(f"sqlite:///{tmp_path}/{name.replace('%', '%25').replace('#', '%23')}")
    await store.enqueue([NewJob(id="a", task="task")])
    [job] = await store.get(["a"])
    assert job is not None
    await store.close()
    assert (tmp_path / name).is_file()


# -- the schema --------------------------------------------------------------------------------------------------


async def test_a_new_file_has_the_committed_schema() -> None:
    fresh = await fresh_dump()
    assert fresh == COMMITTED.read_text(), "after a new migration: python -m tests.store.schema_dump"


async def test_opening_again_changes_nothing(path: Path, url: str) -> None:
    await make(url, "a")
    before = dump(path)
    store = await SqliteStore.open(url)
    version = await store.migrate()
    assert await store.migrate() == version
    [job] = await store.get(["a"])
    assert job is not None
    await store.close()
    assert dump(path) == before


async def test_stores_of_one_process_open_an_empty_file_at_once(path: Path, url: str) -> None:
    stores = await asyncio.gather(*(SqliteStore.open(url) for _ in range(8)))
    assert len({await store.migrate() for store in stores}) == 1
    await asyncio.gather(*(store.close() for store in stores))
    assert dump(path) == await fresh_dump()


async def test_processes_open_an_empty_file_at_once(path: Path, url: str) -> None:
    processes = [python(OPEN, url) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    answers = [(await asyncio.to_thread(process.communicate, "go\n", 30))[0] for process in processes]
    assert {process.returncode for process in processes} == {0}
    assert len(set(answers)) == 1
    assert dump(path) == await fresh_dump()
    connection = sqlite3.connect(path)
    versions = connection.execute("SELECT version FROM fairlane_schema ORDER BY version").fetchall()
    connection.close()
    assert versions == [(number,) for number in range(1, int(answers[0]) + 1)]


async def test_a_newer_schema_is_refused_and_left_alone(path: Path, url: str) -> None:
    await make(url, "a")
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO fairlane_schema VALUES (999, 'tomorrow')")
    connection.commit()
    before = list(connection.iterdump())
    with pytest.raises(SchemaMismatch, match=r"999.*Upgrade Fairlane"):
        await SqliteStore.open(url)
    assert list(connection.iterdump()) == before
    connection.close()


# -- refusals ----------------------------------------------------------------------------------------------------


async def test_a_missing_folder_is_unavailable_with_advice(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="does not exist; create it"):
        await SqliteStore.open(f"sqlite:///{tmp_path}/nowhere/fairlane.db")


async def test_a_transaction_that_is_open_on_a_new_file_is_named_in_the_error(
    path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_MILLISECONDS", 50)
    mine = sqlite3.connect(path, isolation_level=None)
    mine.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match=r"perhaps your own.*open the application before you begin one"):
        await SqliteStore.open(url)
    mine.execute("ROLLBACK")
    mine.close()
    await (await SqliteStore.open(url)).close()


async def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        await SqliteStore.open(f"sqlite:///{tmp_path}")


def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path, url: str) -> None:
    path.write_text("Dear diary, " * 1000)
    with pytest.raises(SchemaMismatch, match="not a Fairlane database"):
        asyncio.run(make(url))
    assert path.read_text() == "Dear diary, " * 1000


def test_an_empty_file_is_a_new_store(path: Path, url: str) -> None:
    path.touch()
    asyncio.run(make(url, "a"))
    assert dump(path) == asyncio.run(fresh_dump())


def test_a_damaged_file_is_refused(path: Path, url: str) -> None:
    asyncio.run(make(url, *map(str, range(500))))
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))
    with pytest.raises(SchemaMismatch, match="damaged"):
        asyncio.run(make(url, "a"))


def test_a_refused_file_holds_no_resources(path: Path, url: str) -> None:
    path.write_text("no database" * 100)
    before = set(threading.enumerate())
    refusals = []
    for _ in range(3):
        # Kept: what a rejection holds is not released by chance.
        with pytest.raises(SchemaMismatch) as refusal:
            asyncio.run(make(url))
        refusals.append(refusal)
    names = [str(number.readlink()) for number in Path("/proc/self/fd").iterdir() if number.is_symlink()]
    assert [name for name in names if str(path) in name] == []
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if path.name in thread.name] == []


# -- permissions -------------------------------------------------------------------------------------------------


def told_to_nobody(url: str) -> str:
    """The errors that an unprivileged process gets when it opens the store and writes to it."""
    return python(WRITE_AS_NOBODY, url).communicate(timeout=30)[0]


def test_a_new_file_in_a_folder_that_may_not_be_written_is_read_only(public: Path) -> None:
    public.chmod(0o555)
    told = told_to_nobody(f"sqlite:///{public}/fairlane.db")
    assert told.startswith("StoreReadOnly: ")
    assert "permissions" in told


def test_a_store_in_a_folder_that_may_not_be_written_is_read_only(public: Path) -> None:
    url = f"sqlite:///{public}/fairlane.db"
    asyncio.run(make(url, "b"))
    public.chmod(0o555)
    assert told_to_nobody(url).startswith("StoreReadOnly: ")


def test_a_file_that_may_not_be_written_is_read_only(public: Path) -> None:
    url = f"sqlite:///{public}/fairlane.db"
    asyncio.run(make(url, "b"))
    for file in public.iterdir():
        file.chmod(0o666)
    (public / "fairlane.db").chmod(0o444)
    assert told_to_nobody(url).startswith("StoreReadOnly: ")


def test_a_world_writable_file_is_written_by_any_user(public: Path) -> None:
    # For comparison: the tests before fail because of the permissions, and of nothing else.
    url = f"sqlite:///{public}/fairlane.db"
    asyncio.run(make(url, "b"))
    for file in public.iterdir():
        file.chmod(0o666)
    assert told_to_nobody(url) == ""
