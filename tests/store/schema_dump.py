"""The schema as one text. ``python -m tests.store.schema_dump`` writes it to `COMMITTED`, after a new migration."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path
from tempfile import TemporaryDirectory

from fairlane.store.sqlite.store import SqliteStore

COMMITTED = Path(__file__).parent / "sqlite" / "schema.sql"


def dump(path: Path) -> str:
    """Everything that was created in a file, by name, without comments and with single spaces."""
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite%'")
    statements = sorted(" ".join(re.sub(r"--[^\n]*", "", sql).split()) for (sql,) in rows)
    connection.close()
    return "".join(f"{statement};\n" for statement in statements)


async def fresh_dump() -> str:
    """The schema of a store made just now."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "fairlane.db"
        store = await SqliteStore.open(f"sqlite:///{path}")
        await store.close()
        return dump(path)


if __name__ == "__main__":
    COMMITTED.write_text(asyncio.run(fresh_dump()))
