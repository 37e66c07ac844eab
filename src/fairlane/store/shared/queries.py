"""For the SQL stores: named queries from `.sql` files, and numbered migrations.

A query file holds blocks that begin with ``-- name: the_name``, followed by comments. ``/*the_name*/`` in a block is
replaced by the text of that block, so that long lists of columns are written once, and names such as ``STATE.PENDING``
by their numbers. All values are parameters.
"""

from __future__ import annotations

import re
from importlib.resources import files

import msgspec

from ..codes import with_codes

_FRAGMENT = re.compile(r"/\*(\w+)\*/")
_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def load_queries(package: str, folder: str = "sql") -> dict[str, str]:
    """Return every named query of the package's query files, by name."""
    queries: dict[str, str] = {}
    for file in sorted(files(package).joinpath(folder).iterdir(), key=lambda f: f.name):
        if not file.name.endswith(".sql"):
            continue
        parts = _NAME.split(file.read_text())
        for name, body in zip(parts[1::2], parts[2::2], strict=True):
            if name in queries:
                raise ValueError(f"query {name} is defined twice, again in {file.name}")
            lines = (line for line in body.splitlines() if line.strip() and not line.lstrip().startswith("--"))
            queries[name] = "\n".join(lines)
    return {name: with_codes(_FRAGMENT.sub(lambda match: queries[match[1]], text)) for name, text in queries.items()}


class Migration(msgspec.Struct, frozen=True):
    """One numbered step of a schema."""

    number: int
    name: str
    script: str


def load_migrations(package: str, folder: str = "migrations") -> list[Migration]:
    """Return the package's migrations in order. Their numbers start at 1 and have no gaps."""
    found = []
    for file in files(package).joinpath(folder).iterdir():
        number, _, name = file.name.removesuffix(".sql").partition("_")
        if file.name.endswith(".sql"):
            found.append(Migration(int(number), name, with_codes(file.read_text())))
    found.sort(key=lambda migration: migration.number)
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"the migrations of {package} are not numbered 1, 2, 3 …")
    return found
