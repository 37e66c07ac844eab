"""Counts the files that one job crosses from ``enqueue()`` to ``result()``, for each store.

The command is ``python -m benchmarks.files_crossed``; with ``--list`` it prints the files too.

Client and worker run in one process, which is traced. A file counts if one of its functions ran for each of the
traced jobs, so that what happens once in a while (renewals, polls, passes of the manager) is left out. Counted are the
Python modules of the package, the ``.sql`` files whose statements or functions were executed and the ``.lua`` files of
which a function ran. Functions that PostgreSQL inlines into a statement are not seen.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import fairlane
from fairlane import Fairlane
from fairlane.store.shared.queries import load_queries
from tests.servers.stores import KINDS, empty_stores

PACKAGE = Path(fairlane.__file__).parent
JOBS = 20
WARM_UP = 5
LUA_FUNCTION = re.compile(r"^(.*\bfunction\b[^()]*\([^()]*\))[ \t]*$", re.MULTILINE)
SQL_FUNCTION = re.compile(r"CREATE (?:OR REPLACE )?FUNCTION (?:[^\s(]*\.)?(\w+)")
SQL_QUERY = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


class Tracer:
    """Collects the files of the package whose functions run, one set for each job."""

    def __init__(self) -> None:
        self.seen: set[str] | None = None
        self._statements = _statements()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        seen = self.seen
        if seen is None or event not in ("call", "c_call"):
            return
        path = frame.f_code.co_filename
        if not path.startswith(str(PACKAGE)):
            return
        seen.add(path)
        for value in list(frame.f_locals.values()):
            file = self._statements.get(value) if isinstance(value, str) else None
            if file is not None and Path(file).parents[1] in Path(path).parents:
                seen.add(file)


def _statements() -> dict[str, str]:
    """The file of every named statement, by its name and by its text."""
    found = {}
    for folder in {path.parent for path in PACKAGE.rglob("sql/*.sql")}:
        package = ".".join(("fairlane", *folder.parent.relative_to(PACKAGE).parts))
        texts = load_queries(package)
        for path in folder.glob("*.sql"):
            for name in SQL_QUERY.findall(path.read_text()):
                found[name] = found[texts[name]] = str(path)
    return found


@contextmanager
def traced_lua() -> Iterator[None]:
    """Add a line to every Lua function that notes its file, and a function that returns the notes and clears them."""
    read_text = Path.read_text

    def noted(path: Path, *args: Any, **kwargs: Any) -> str:
        text = read_text(path, *args, **kwargs)
        if path.suffix != ".lua":
            return text
        text = LUA_FUNCTION.sub(rf"\1 CROSSED['{path.relative_to(PACKAGE)}'] = true", text)
        if path.stem == "head":
            text = f"local CROSSED = {{}}\n{text}"
        if path.stem == "verbs":
            text += """
            redis.register_function(NAME .. '_crossed', function()
                local files = {}
                for file in pairs(CROSSED) do files[#files + 1] = file end
                for _, file in ipairs(files) do CROSSED[file] = nil end
                return files
            end)
            """
        return text

    with patch.object(Path, "read_text", noted):
        yield


async def _files(kind: str, url: str) -> set[str]:
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    app = Fairlane(url)

    @app.task(lane="user:{user}", name="greet")
    async def greet(user: str) -> str:
        return f"hello {user}"

    worker = asyncio.create_task(app.worker(manager=False).run())

    async def one() -> None:
        assert await (await greet.enqueue("ann")).result(timeout=30) == "hello ann"

    for _ in range(WARM_UP):
        await one()
    before, read = await _server_side(kind, url)
    jobs = []
    for _ in range(JOBS):
        tracer.seen = set()
        await one()
        jobs.append(tracer.seen | await read())
        tracer.seen = None
    sys.setprofile(None)
    threading.setprofile(None)
    worker.cancel()
    await asyncio.wait([worker])
    await app.close()
    return set.intersection(*jobs) | await before()


async def _nothing() -> set[str]:
    return set()


async def _server_side(
    kind: str, url: str
) -> tuple[Callable[[], Awaitable[set[str]]], Callable[[], Awaitable[set[str]]]]:
    """Two functions: files that the server counted for all jobs, to be read at the end, and those of the last job."""
    if kind == "postgresql":
        return lambda: _postgresql_functions(url), _nothing
    if kind == "redis":
        import redis.asyncio

        parts = urlsplit(url)
        client = redis.asyncio.Redis(host=parts.hostname or "", port=parts.port or 0, decode_responses=True)
        name = next(library["library_name"] for library in _as_dicts(await client.function_list()))

        async def crossed() -> set[str]:
            return {str(PACKAGE / file) for file in await client.fcall(f"{name}_crossed", 0)}

        await crossed()
        return _nothing, crossed
    return _nothing, _nothing


def _as_dicts(libraries: Any) -> list[dict[str, Any]]:
    return [each if isinstance(each, dict) else dict(zip(each[::2], each[1::2], strict=True)) for each in libraries]


async def _postgresql_functions(url: str) -> set[str]:
    """The files of the functions that were called for every job, by the server's own statistics."""
    connection = await import_module("asyncpg").connect(url)
    # The name of a function ends in the version of its library.
    rows = await connection.fetch(
        "SELECT regexp_replace(funcname, '_[0-9a-f]{12}$', '') AS funcname, sum(calls) AS calls "
        "FROM pg_stat_user_functions GROUP BY 1"
    )
    await connection.close()
    calls = Counter({row["funcname"]: int(row["calls"]) for row in rows})
    return {
        str(path)
        for path in PACKAGE.rglob("*.sql")
        for name in SQL_FUNCTION.findall(path.read_text())
        if calls[name] >= JOBS
    }


async def _counted(kind: str, url: str) -> set[str]:
    if kind == "postgresql":
        connection = await import_module("asyncpg").connect(url)
        database = await connection.fetchval("SELECT current_database()")
        await connection.execute(f"ALTER DATABASE \"{database}\" SET track_functions = 'all'")
        await connection.close()
    return await _files(kind, url)


def main() -> None:
    """Print a row for each store, and with ``--list`` the files."""
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder, empty_stores(kind, Path(folder)) as stores, traced_lua():
            files = sorted(str(Path(file).relative_to(PACKAGE)) for file in asyncio.run(_counted(kind, stores.next())))
        kinds = Counter(Path(file).suffix for file in files)
        print(f"{kind:12}{len(files):4} files: " + ", ".join(f"{count} {suffix}" for suffix, count in kinds.items()))
        if "--list" in sys.argv:
            print(*(f"    {file}" for file in files), sep="\n")


if __name__ == "__main__":
    main()
