"""The suite is complete: every verb of the port is called by a test, directly or through a shared module."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from pathlib import Path

from fairlane.store.port import Store

SUITE = Path(__file__).parent
PROPERTIES = {name for name, member in vars(Store).items() if isinstance(member, property)}


def verbs_of(port: type) -> set[str]:
    """The verbs of a store."""
    functions = {name for name, member in vars(port).items() if inspect.isfunction(member)}
    return {name for name in functions | PROPERTIES if not name.startswith("_")}


class Uses:
    """The verbs that a piece of source calls on a store, and the names of other functions that it calls."""

    def __init__(self, node: ast.AST) -> None:
        self.verbs: set[str] = set()
        self.calls: set[str] = set()
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                self._call(each.func)
            elif isinstance(each, ast.Attribute) and each.attr in PROPERTIES and _is_store(each.value):
                self.verbs.add(each.attr)

    def _call(self, function: ast.expr) -> None:
        if isinstance(function, ast.Name):
            self.calls.add(function.id)
        elif isinstance(function, ast.Attribute):
            # A call on anything but a store may be that of a helper of this name.
            (self.verbs if _is_store(function.value) else self.calls).add(function.attr)


def _is_store(node: ast.expr) -> bool:
    """Whether an expression is a store by its name: ``store``, ``kit.store``, ``self.kit.store``."""
    return (isinstance(node, ast.Name) and node.id == "store") or (
        isinstance(node, ast.Attribute) and node.attr == "store"
    )


def functions_of(sources: Iterable[str]) -> dict[str, list[Uses]]:
    """The functions of some sources by name, each with what it uses."""
    found: dict[str, list[Uses]] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, []).append(Uses(node))
    return found


def verbs_used(tests: Iterable[str], helpers: Iterable[str]) -> set[str]:
    """The verbs that the tests reach. The code at module level counts as a part of its tests."""
    functions = functions_of(helpers)
    used: set[str] = set()
    seen: set[str] = set()
    pending = [Uses(ast.parse(source)) for source in tests]
    while pending:
        uses = pending.pop()
        used |= uses.verbs
        for name in uses.calls - seen:
            seen.add(name)
            pending += functions.get(name, [])
    return used


def sources_of(suite: Path) -> tuple[list[str], list[str]]:
    """The suite's tests and the modules they share. Modules that only prepare stores do not count."""
    modules = [path for path in suite.rglob("*.py") if path.name not in ("conftest.py", Path(__file__).name)]
    tests = [path for path in modules if path.name.startswith("test_")]
    return [path.read_text() for path in tests], [path.read_text() for path in modules if path not in tests]


def test_every_verb_of_the_port_is_called_by_a_test() -> None:
    tests, helpers = sources_of(SUITE)

    untested = verbs_of(Store) - verbs_used(tests, helpers)

    assert not untested, f"no conformance test calls {', '.join(sorted(untested))}"


def test_the_verbs_of_the_port_are_found() -> None:
    assert verbs_of(Store) >= {"wakeups", "register", "enqueue", "claim", "finish", "rescue", "close"}


def test_a_verb_without_a_caller_is_found() -> None:
    put = "class Kit:\n async def put(self): await self.store.enqueue([])"
    stop = "async def stop(kit): await kit.store.close()"
    test = "async def test_it(kit, store):\n await kit.put()\n await store.claim(1)\n await other.finish()"

    assert verbs_used([test], [put, stop]) == {"enqueue", "claim"}


def test_a_verb_is_found_behind_two_helpers() -> None:
    helper = "async def a(kit): await b(kit)\nasync def b(kit): await kit.store.renew('s', [], claim=1)"

    assert verbs_used(["async def test_it(kit): await a(kit)"], [helper]) == {"renew"}


def test_a_property_is_used_by_reading_it() -> None:
    assert verbs_used(["def test_it(store): store.wakeups.publish([])"], []) == {"wakeups"}


def test_a_mention_is_not_a_call() -> None:
    test = 'async def test_it(store):\n "store.claim()"\n x = store.claim\n # store.finish()'

    assert verbs_used([test], []) == set()
