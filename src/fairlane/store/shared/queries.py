"""For the SQL stores: named queries out of `.sql` files, and numbered migrations.

A query file holds blocks that begin with ``-- name: the_name``; further comment lines say why. Where
``/*the_name*/`` stands in a block, the text of that block is put: long lists of columns are written once. Nothing
else is ever put into a statement but parameters.
"""

from __future__ import annotations

import re
from importlib.resources import files

import msgspec

from ..codes import with_codes

_FRAGMENT = re.compile(r"/\*(\w+)\*/")
_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def load_queries(package: str, folder: str = "sql") -> dict[str, str]:
    """Every named query of the package's query files."""
    queries: dict[str, str] = {}
    for file in sorted(files(package).joinpath(folder).iterdir(), key=lambda f: f.name):
        if not file.name.endswith(".sql"):
            continue
        parts = _NAME.split(file.read_text())
        for name, body in zip(parts[1::2], parts[2::2], strict=True):
            if name in queries:
                raise ValueError(f"the query {name} is written twice, again in {file.name}")
            lines = (line for line in body.splitlines() if line.strip() and not line.lstrip().startswith("--"))
            queries[name] = "\n".join(lines)
    return {name: _FRAGMENT.sub(lambda match: queries[match[1]], with_codes(text)) for name, text in queries.items()}


class Migration(msgspec.Struct, frozen=True):
    """One numbered step of a schema."""

    number: int
    name: str
    script: str


def load_migrations(package: str, folder: str = "migrations") -> list[Migration]:
    """The package's migrations in order, numbered from 1 without a gap."""
    found = []
    for file in files(package).joinpath(folder).iterdir():
        number, _, name = file.name.removesuffix(".sql").partition("_")
        if file.name.endswith(".sql"):
            found.append(Migration(int(number), name, with_codes(file.read_text())))
    found.sort(key=lambda migration: migration.number)
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"the migrations of {package} are not numbered 1, 2, 3 …")
    return found
