"""The folders of the package are its layers: an import may only point to an earlier line of `LAYERS`.

Every import counts, also one inside a function or under TYPE_CHECKING.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "fairlane"

LAYERS = (
    {"error_text"},
    {"errors"},
    {"model"},
    {"events", "event_loops"},
    {"store"},
    {"manager"},
    {"runtime"},
    {"handle", "hooks", "task", "turn", "bulk", "client", "blocking", "documents", "config", "doctor"},
    {"supervisor"},
    {"worker"},
    {"app"},
    {"testing"},
    {"integrations"},
    {""},  # fairlane/__init__.py
    {"http"},
    {"cli"},
    {"__main__"},
)
STORES = {"store.sqlite", "store.postgresql", "store.redis", "store.postgresql_redis"}
COMPOSED = {"store.postgresql_redis": {"store.postgresql", "store.redis"}}
"""A store that is composed of other stores may import them."""
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

SMALL_LIBRARIES = frozenset({"msgspec", "cronsim"})
OUTSIDE_WORLD = frozenset({"asyncio", "os", "selectors", "socket", "sqlite3", "subprocess", "threading", "time"})
PURE_EXCEPT = {"model.ids": {"os", "time", "uuid_utils"}}
"""Imports of single modules of the model that are permitted, because they are their purpose."""
UNSAFE_CODECS = frozenset({"marshal", "pickle", "shelve"})
NAMES_THAT_SAY_NOTHING = frozenset({"common", "core", "helpers", "misc", "types", "utils"})
MAX_LINES = 450
MAX_TOP_LEVEL = 16

Modules = dict[str, str]
"""The text of each module, by its dotted name relative to the package; a package's own name ends with a dot."""


def modules_of_package() -> Modules:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts).removesuffix("__init__")] = path.read_text(encoding="utf-8")
    return found


def imports_of(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the absolute dotted name of everything a module imports."""
    here = ["fairlane", *name.split(".")][:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def violations(name: str, text: str) -> list[str]:
    """Return a sentence for every import of the module that breaks a rule."""
    found = []
    for line, imported in imports_of(name, text):
        why = _why_forbidden(name, imported)
        if why:
            found.append(f"{name or '__init__'}:{line}: {why}")
    return found


def _why_forbidden(name: str, imported: str) -> str | None:
    top, _, inside = imported.partition(".")
    layer = name.partition(".")[0]
    if top in UNSAFE_CODECS:
        return f"nothing may import {top}: payloads are JSON"
    if top != "fairlane":
        return _why_impure(name, top) if layer == "model" else None
    target = inside.partition(".")[0]
    target = target if target in RANK else ""
    if RANK[target] > RANK[layer]:
        return f"{layer} may not import {imported}: it belongs to a later layer"
    stores = {".".join(each.split(".")[:2]) for each in (name, inside)} & STORES
    here = ".".join(name.split(".")[:2])
    if len(stores) == 2 and stores - {here} <= COMPOSED.get(here, set()):
        return None
    if len(stores) == 2 or (stores and layer != "store"):
        return f"only open_store() and the store itself may import {imported}"
    return None


def _why_impure(name: str, top: str) -> str | None:
    if top in PURE_EXCEPT.get(name, ()):
        return None
    if top in OUTSIDE_WORLD or (top not in sys.stdlib_module_names and top not in SMALL_LIBRARIES):
        return f"the model may not import {top}"
    return None


def test_no_arrow_points_back() -> None:
    modules = modules_of_package()
    assert {name.partition(".")[0] for name in modules} == set(RANK), "LAYERS lists every folder and top-level module"
    broken = [violation for name, text in modules.items() for violation in violations(name, text)]
    assert not broken, "\n".join(broken)


def test_the_top_level_stays_small() -> None:
    top = [path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]
    assert len(top) <= MAX_TOP_LEVEL, sorted(top)


def test_module_names_say_something() -> None:
    empty = [name for name in modules_of_package() if not NAMES_THAT_SAY_NOTHING.isdisjoint(name.split("."))]
    assert not empty, f"name these after the noun they hold: {', '.join(empty)}"


def test_the_conformance_suite_knows_no_store() -> None:
    knowing = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path in sorted((ROOT / "tests" / "conformance").rglob("*.py"))
        if path.name != "conftest.py"
        for line, imported in imports_of("", path.read_text(encoding="utf-8"))
        if imported == "fairlane.store.open_store" or imported.startswith(tuple(f"fairlane.{each}" for each in STORES))
    ]
    assert not knowing, "\n".join(knowing)


def test_no_file_outgrows_its_budget() -> None:
    files = [
        path for top in (PACKAGE, ROOT / "tests") for kind in ("py", "sql", "lua") for path in top.rglob(f"*.{kind}")
    ]
    lines = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    long = [f"{path} has {count} lines: split it by noun" for path, count in lines.items() if count > MAX_LINES]
    assert not long, "\n".join(long)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.job", "import asyncio"),
        ("model.job", "def f():\n    import time"),
        ("model.job", "import redis"),
        ("model.job", "from ..store.port import Store"),
        ("model.job", "from fairlane import Client"),
        ("store.port", "from ..client import Client"),
        ("store.sqlite.store", "from fairlane.store.redis import library"),
        ("store.sqlite.store", "from ...worker import fetcher"),
        ("worker.fetcher", "from fairlane.store.sqlite.store import SqliteStore"),
        ("worker.fetcher", "from fairlane.app import Fairlane"),
        ("cli.main", "import pickle"),
    ],
)
def test_a_forbidden_import_is_found(name: str, text: str) -> None:
    assert len(violations(name, text)) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.ids", "import os, time\nimport uuid_utils"),
        ("model.schedule", "from cronsim import CronSim\nfrom datetime import datetime\nfrom ..errors import X"),
        ("store.", "from .sqlite.store import SqliteStore"),
        ("store.sqlite.store", "import sqlite3\nfrom ..shared.queries import load_queries"),
        ("worker.worker", "import asyncio\nfrom ..store.port import Store\nfrom .fetcher import Fetcher"),
        ("cli.main", "import fairlane\nfrom fairlane.store import open_store"),
        ("", "from .client import Client"),
    ],
)
def test_an_allowed_import_passes(name: str, text: str) -> None:
    assert violations(name, text) == []
