"""The SQL texts of this store for one schema: named queries, migrations, functions and grants.

In every `.sql` file the schema is written ``fairlane.``, and loading replaces that by the quoted name of the chosen
schema. It is replaced wherever a name may begin, in string literals too (``nextval('fairlane.arrival')``), but not
after a letter, a digit, an underscore or a dot, where it is a part of a longer name. Settings that functions use are
therefore called ``fairlane_step.…``. The name of a library function gets the version of the library, and
``fairlane.LIBRARY`` is replaced by that version itself.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from ..shared.queries import Migration, load_migrations, load_queries
from . import library
from .address import SCHEMA

PACKAGE = library.PACKAGE
_SCHEMA = re.compile(r"(?<![\w.])fairlane\.(\w*)")
_NEEDS = re.compile(r"^-- needs: (\d+)$", re.MULTILINE)


def quoted(name: str) -> str:
    """A name as a quoted identifier."""
    return '"' + name.replace('"', '""') + '"'


def placed(text: str, schema: str) -> str:
    """The text with ``fairlane.`` replaced by the schema, and with the names that functions have in the database."""
    functions, prefix = library.names(), f"{quoted(schema)}."

    def name(match: re.Match[str]) -> str:
        if match[1] == "LIBRARY":
            return library.version()
        return prefix + (library.versioned(match[1]) if match[1] in functions else match[1])

    return _SCHEMA.sub(name, text)


@lru_cache(maxsize=16)
def queries(schema: str) -> dict[str, str]:
    """Every named query of `sql/*.sql`. The same dictionary each time: do not change it."""
    return {name: placed(text, schema) for name, text in load_queries(PACKAGE).items()}


def grants(kind: str, role: str, schema: str = SCHEMA) -> str:
    """The statements by which the owner of the schema makes a role a ``worker``, a ``producer`` or a ``viewer``."""
    name, place = quoted(role), f"SCHEMA {quoted(schema)}"
    text = re.sub(r"\bSCHEMA fairlane\b", lambda _: place, queries(schema)[f"grant_{kind}"])
    return re.sub(rf"\bfairlane_{kind}\b", lambda _: name, text)


class Change(msgspec.Struct, frozen=True):
    """A migration for one schema."""

    number: int
    name: str
    script: str
    needs: int
    """A migration: code that knows it can work with the schema, older code cannot."""


@lru_cache(maxsize=16)
def library_scripts(schema: str) -> tuple[str, ...]:
    """The scripts that install the function library."""
    return tuple(placed(script, schema) for script in library.scripts())


@lru_cache(maxsize=16)
def changes(schema: str) -> tuple[Change, ...]:
    """The migrations in order."""
    return tuple(_change(migration, schema) for migration in load_migrations(PACKAGE))


def _change(migration: Migration, schema: str) -> Change:
    said = _NEEDS.findall(migration.script)
    needs = int(said[0]) if said else migration.number
    if len(said) > 1 or needs > migration.number:
        raise ValueError(f"migration {migration.number} says more than once what it needs, or more than itself")
    return Change(migration.number, migration.name, placed(migration.script, schema), needs)
