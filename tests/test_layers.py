"""The layers of the package, and the imports that they allow.

`LAYERS` is the whole rule: which module lives in which layer, and what that layer may see. Every import
counts, also one inside a function or under TYPE_CHECKING.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "fairlane"
TESTS = ROOT / "tests"

SMALL_LIBRARIES = frozenset({"msgspec", "cronsim"})
OUTSIDE_WORLD = frozenset(
    {"asyncio", "os", "selectors", "socket", "sqlite3", "subprocess", "threading", "time"},
)
CLOCK_READS = frozenset({"now", "today", "utcnow"})
UNSAFE_CODECS = frozenset({"marshal", "pickle", "shelve"})
NAMES_THAT_SAY_NOTHING = frozenset({"common", "core", "helpers", "misc", "types", "utils"})
MAX_LINES = 450
WHERE_TO_ADD = "add the module to LAYERS in tests/test_layers.py"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Modules are named relative to the package; `worker.*` is the package `worker` and all it holds."""

    modules: tuple[str, ...]
    may_import: tuple[str, ...]
    """Other layers. A layer may always import itself."""
    pure: bool = False
    """Neither the outside world nor the wall clock, and of third parties the small libraries alone."""
    exceptions: dict[str, frozenset[str]] = field(default_factory=dict)
    """What one module of a pure layer may import all the same, because that is its job."""


BACKENDS = ("sqlite", "postgresql", "redis")
BELOW_THE_EDGES = ("core", "ports", "backends", "sql", *BACKENDS, "application")

LAYERS: dict[str, Layer] = {
    "core": Layer(
        modules=(
            *("codec", "errors", "fairness", "ids", "job", "lanes", "names"),
            *("placement", "retry", "schedule", "settings", "slots", "states", "tokens"),
        ),
        may_import=(),
        pure=True,
        exceptions={"ids": frozenset({"os", "time", "uuid_utils"})},
    ),
    "ports": Layer(
        modules=(
            *("binding", "clock", "finding", "listings", "loops", "reading", "records"),
            *("session", "store", "upkeep", "wakeups"),
        ),
        may_import=("core",),
        pure=True,
        exceptions={"clock": frozenset({"time"}), "loops": frozenset({"asyncio", "os", "uvloop"})},
    ),
    # open_store(url): the one place that knows every backend.
    "backends": Layer(
        modules=("backends",),
        may_import=("core", "ports", "sql", *BACKENDS),
    ),
    # What backends have in common: of their records, of their connections, and of their wake-ups.
    "sql": Layer(
        modules=(
            *("backends.claims", "backends.codes", "backends.figures", "backends.rows", "backends.sql.*"),
            *(
                "backends.patience",
                "backends.pools",
                "backends.sockets",
                "backends.stored_settings",
                "backends.token_rows",
            ),
            *("backends.ears", "backends.notifier", "backends.topics"),
        ),
        may_import=("core", "ports", "backends"),
    ),
    # One layer for each backend, so that none can import another.
    "sqlite": Layer(modules=("backends.sqlite.*",), may_import=("core", "ports", "backends", "sql")),
    "postgresql": Layer(modules=("backends.postgresql.*",), may_import=("core", "ports", "backends", "sql")),
    "redis": Layer(modules=("backends.redis.*",), may_import=("core", "ports", "backends", "sql")),
    "application": Layer(
        modules=(
            *(
                "arguments",
                "blocking",
                "bulk",
                "client",
                "connection",
                "declaration",
                "diagnosis",
                "discovery",
                "events",
                "handle",
            ),
            *("hints", "hooks", "intervals", "keeper", "logs", "loop_thread", "origin", "retry_rule"),
            *(
                "manager.*",
                "observed",
                "running",
                "service",
                "supervisor.*",
                "task",
                "template",
                "transactions",
                "turn",
                "waiter",
                "watching",
                "worker.*",
            ),
        ),
        may_import=("core", "ports"),
    ),
    "edges": Layer(
        modules=(
            *("__main__", "app", "celery", "cli.*", "config", "dashboard.*", "http.*", "integrations.*"),
            *("opentelemetry", "probes", "prometheus", "pytest_plugin", "testing.*"),
        ),
        may_import=(*BELOW_THE_EDGES, "root"),
    ),
    # fairlane/__init__.py
    "root": Layer(modules=("",), may_import=(*BELOW_THE_EDGES, "edges")),
}


@dataclass(frozen=True)
class Module:
    """One source file. `name` is dotted and relative to the package, empty for the package itself."""

    name: str
    text: str
    is_package: bool = False

    def __str__(self) -> str:
        """Tell the module as an import would."""
        return f"fairlane.{self.name}" if self.name else "fairlane"


@dataclass(frozen=True)
class Import:
    """`module` is absolute; `name` is what a from-import takes out of it, else empty."""

    module: str
    name: str
    line: int

    @property
    def top(self) -> str:
        """The distribution or standard library module it comes from."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        """Tell the import as one dotted name."""
        return f"{self.module}.{self.name}" if self.name else self.module


def modules_of_package() -> list[Module]:
    """Read every Python module under src/fairlane."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    return found


def imports_of(module: Module) -> Iterator[Import]:
    """Yield every import of a module, relative ones made absolute."""
    for node in ast.walk(ast.parse(module.text)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                package = str(module).split(".")
                climb = node.level - 1 if module.is_package else node.level
                source = ".".join([*package[: len(package) - climb], *filter(None, [source])])
            yield from (Import(source, alias.name, node.lineno) for alias in node.names)


def layer_of(name: str) -> str | None:
    """Return the layer that lists the module `name`, relative to the package."""
    for layer_name, layer in LAYERS.items():
        for pattern in layer.modules:
            folder = pattern.removesuffix(".*")
            if name == folder or (folder != pattern and name.startswith(f"{folder}.")):
                return layer_name
    return None


def layer_imported(found: Import) -> str | None:
    """Return the layer an import of our own package reaches: what it takes may itself be a module."""
    module = found.module.partition(".")[2]
    as_module = ".".join(filter(None, [module, found.name]))
    return layer_of(as_module) or layer_of(module)


def violations(module: Module) -> list[str]:
    """Return a sentence for every rule that the module breaks."""
    layer_name = layer_of(module.name)
    if layer_name is None:
        return [f"{module} is in no layer: {WHERE_TO_ADD}"]
    layer = LAYERS[layer_name]
    found = [
        f"{module}:{each.line}: {reason}"
        for each in imports_of(module)
        if (reason := _why_forbidden(each, module, layer_name))
    ]
    if layer.pure and module.name not in layer.exceptions:
        found += [
            f"{module}:{line}: {layer_name} may not read the clock: {read}" for line, read in clock_reads_of(module)
        ]
    return found


def _why_forbidden(found: Import, module: Module, layer_name: str) -> str | None:
    layer = LAYERS[layer_name]
    if found.top == "fairlane":
        return _why_forbidden_inside(found, layer_name)
    if found.top in UNSAFE_CODECS:
        return f"nothing may import {found.top}: payloads are JSON"
    if not layer.pure or found.top in layer.exceptions.get(module.name, ()):
        return None
    if found.top in OUTSIDE_WORLD:
        return f"{layer_name} may not import {found.top}"
    if found.top not in sys.stdlib_module_names and found.top not in SMALL_LIBRARIES:
        return f"{layer_name} may not import the third party {found.top}"
    return None


def _why_forbidden_inside(found: Import, layer_name: str) -> str | None:
    target = layer_imported(found)
    if target is None:
        return f"{found} is in no layer: {WHERE_TO_ADD}"
    if layer_name == "root" and any(part.startswith("_") for part in str(found).split(".")):
        return f"only public names are exported, not {found}"
    if target != layer_name and target not in LAYERS[layer_name].may_import:
        return f"{layer_name} may not import {found} ({target})"
    return None


def clock_reads_of(module: Module) -> Iterator[tuple[int, str]]:
    """Yield every use of `datetime.now` and its like, by whatever name datetime was imported."""
    tree = ast.parse(module.text)
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and node.module == "datetime") or isinstance(node, ast.Import)
        for alias in node.names
        if isinstance(node, ast.ImportFrom) or alias.name == "datetime"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in CLOCK_READS:
            written = ast.unparse(node)
            if written.partition(".")[0] in names:
                yield node.lineno, written


def says_nothing(name: str) -> bool:
    """Tell whether a module, or a package around it, has a name that fits anything."""
    return not NAMES_THAT_SAY_NOTHING.isdisjoint(name.split("."))


def backends_known(text: str) -> list[str]:
    """Return a sentence for every import of a backend in a conformance test."""
    return [
        f"line {found.line} imports {found}: the suite sees `store` and `clock` alone"
        for found in imports_of(Module("", text))
        if f"{found}.".startswith("fairlane.backends.")
    ]


def too_long(path: Path, text: str) -> str | None:
    """Return a sentence if a file has outgrown its budget."""
    lines = len(text.splitlines())
    if lines <= MAX_LINES:
        return None
    return f"{path} has {lines} lines, more than {MAX_LINES}: split it by noun"


def test_every_module_obeys_its_layer() -> None:
    modules = modules_of_package()
    assert modules, f"no modules under {PACKAGE}"
    broken = [violation for module in modules for violation in violations(module)]
    assert not broken, "\n".join(broken)


def test_layers_name_layers_that_exist() -> None:
    for name, layer in LAYERS.items():
        assert set(layer.may_import) <= LAYERS.keys() - {name}


def test_each_module_is_listed_once() -> None:
    listed = [module for layer in LAYERS.values() for module in layer.modules]
    assert len(listed) == len(set(listed))


def test_module_names_say_something() -> None:
    empty = [str(module) for module in modules_of_package() if says_nothing(module.name)]
    assert not empty, f"name these after the noun they hold: {', '.join(empty)}"


def test_conformance_suite_knows_no_backend() -> None:
    knowing = [
        f"{path.relative_to(ROOT)}: {sentence}"
        for path in sorted((TESTS / "conformance").rglob("*.py"))
        if path.name != "conftest.py"
        for sentence in backends_known(path.read_text(encoding="utf-8"))
    ]
    assert not knowing, "\n".join(knowing)


def test_no_file_outgrows_its_budget() -> None:
    suffixes = ("*.py", "*.sql", "*.lua")
    files = [path for top in (PACKAGE, TESTS) for suffix in suffixes for path in top.rglob(suffix)]
    judged = [too_long(p.relative_to(ROOT), p.read_text(encoding="utf-8")) for p in files]
    long = [sentence for sentence in judged if sentence]
    assert not long, "\n".join(long)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("job", "import asyncio", "fairlane.job:1: core may not import asyncio"),
        ("job", "from os.path import join", "fairlane.job:1: core may not import os"),
        ("job", "def f():\n    import time", "fairlane.job:2: core may not import time"),
        ("job", "import redis", "fairlane.job:1: core may not import the third party redis"),
        ("job", "from fairlane import store", "fairlane.job:1: core may not import fairlane.store (ports)"),
        ("job", "from . import store", "fairlane.job:1: core may not import fairlane.store (ports)"),
        ("job", "from fairlane import Client", "fairlane.job:1: core may not import fairlane.Client (root)"),
        (
            "retry",
            "import datetime as dt\ndt.datetime.now(dt.UTC)",
            "fairlane.retry:2: core may not read the clock: dt.datetime.now",
        ),
        ("store", "import threading", "fairlane.store:1: ports may not import threading"),
        (
            "store",
            "from fairlane.client import Client",
            "fairlane.store:1: ports may not import fairlane.client.Client (application)",
        ),
        (
            "backends.sqlite.store",
            "from fairlane.backends.redis import keys",
            "fairlane.backends.sqlite.store:1: sqlite may not import fairlane.backends.redis.keys (redis)",
        ),
        (
            "backends.sqlite.store",
            "from ...worker import fetcher",
            "fairlane.backends.sqlite.store:1: sqlite may not import fairlane.worker.fetcher (application)",
        ),
        (
            "backends.sql",
            "import fairlane.backends.sqlite.store",
            "fairlane.backends.sql:1: sql may not import fairlane.backends.sqlite.store (sqlite)",
        ),
        (
            "worker.fetcher",
            "from fairlane.backends import open_store",
            "fairlane.worker.fetcher:1: application may not import fairlane.backends.open_store (backends)",
        ),
        (
            "manager.pruner",
            "from fairlane.config import Settings",
            "fairlane.manager.pruner:1: application may not import fairlane.config.Settings (edges)",
        ),
        ("cli.main", "import pickle", "fairlane.cli.main:1: nothing may import pickle: payloads are JSON"),
        (
            "",
            "from fairlane.job import _x",
            "fairlane:1: only public names are exported, not fairlane.job._x",
        ),
        (
            "job",
            "from fairlane.novel import X",
            f"fairlane.job:1: fairlane.novel.X is in no layer: {WHERE_TO_ADD}",
        ),
        (
            "backends.novel",
            "",
            "fairlane.backends.novel is in no layer: add the module to LAYERS in tests/test_layers.py",
        ),
    ],
)
def test_a_forbidden_import_is_found(name: str, text: str, expected: str) -> None:
    assert violations(Module(name, text)) == [expected]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ids", "import os, time\nimport uuid_utils"),
        ("clock", "import time"),
        (
            "schedule",
            "from cronsim import CronSim\nfrom datetime import datetime\nfrom fairlane.errors import X",
        ),
        ("backends", "from fairlane.backends.sqlite.store import SqliteStore"),
        ("backends.sqlite.store", "import sqlite3\nfrom fairlane.backends.sql import queries"),
        ("worker.worker", "import asyncio\nfrom fairlane.store import Store\nfrom .fetcher import Fetcher"),
        ("cli.main", "import fairlane\nfrom fairlane.backends import open_store"),
        ("", "from fairlane.client import Client"),
    ],
)
def test_an_allowed_import_is_let_through(name: str, text: str) -> None:
    assert violations(Module(name, text)) == []


def test_relative_import_in_a_package_starts_at_the_package() -> None:
    package = Module("worker", "from . import fetcher\nfrom ..store import Store", is_package=True)
    assert [str(found) for found in imports_of(package)] == [
        "fairlane.worker.fetcher",
        "fairlane.store.Store",
    ]


def test_a_long_file_is_found() -> None:
    assert too_long(Path("a.sql"), "x\n" * MAX_LINES) is None
    assert too_long(Path("a.sql"), "x\n" * 451) == "a.sql has 451 lines, more than 450: split it by noun"


@pytest.mark.parametrize("name", ["utils", "worker.helpers", "backends.common.rows"])
def test_an_empty_name_is_found(name: str) -> None:
    assert says_nothing(name)
    assert not says_nothing(f"{name}_of_jobs".replace(".", "_"))


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("from fairlane import backends", "fairlane.backends"),
        ("from fairlane.backends import open_store", "fairlane.backends.open_store"),
        ("import fairlane.backends.sqlite", "fairlane.backends.sqlite"),
    ],
)
def test_a_backend_in_the_conformance_suite_is_found(text: str, imported: str) -> None:
    assert backends_known(f"from fairlane.store import Store\n{text}") == [
        f"line 2 imports {imported}: the suite sees `store` and `clock` alone"
    ]
