"""Which tests run on which kind of store."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from fairlane.store.port import Store
from tests.conformance import conftest
from tests.conformance.conftest import kinds_for
from tests.conformance.test_every_verb import SUITE, sources_of, verbs_of, verbs_used

from . import installation
from .installation import Installation
from .stores import EVERY_VERSION, runs_on_second_version, second_postgresql

SECOND = "postgresql15"


def without_the_others(name: str, source: str) -> str:
    """A test module with only those tests that run on the second version."""
    module = importlib.import_module(name)
    tree = ast.parse(source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    others = [f for f in functions if f.name.startswith("test_") and SECOND not in kinds_for(f.name, module)]
    tree.body = [node for node in tree.body if node not in others]
    return ast.unparse(tree)


def test_the_second_version_sees_every_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EVERY_VERSION, raising=False)
    monkeypatch.setattr(conftest, "second_versions", lambda: [SECOND])
    files = [path for path in SUITE.glob("test_*.py") if path.name != "test_every_verb.py"]
    tests, helpers = sources_of(SUITE)
    chosen = [without_the_others(f"tests.conformance.{path.stem}", path.read_text()) for path in files]
    assert sum(map(len, chosen)) < sum(map(len, tests)) / 2, "nearly all tests run twice"
    unseen = verbs_of(Store) - verbs_used(chosen, helpers)
    assert not unseen, f"no test of the second version calls {', '.join(sorted(unseen))}"


SAMPLE = """
def helper(store): store.rescue()
def test_nothing(kit): kit.put()
def test_nothing_again(kit): kit.put()
async def test_claim(store): await store.claim()
async def test_claim_again(store): await store.claim()
async def test_inside(kit):
    async def inside(): await kit.store.renew()
    await inside()
async def test_two(store): await store.claim(); await store.finish()
"""


def test_what_is_first_in_its_file_or_names_a_verb_first_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(EVERY_VERSION, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sample_of_tests.py").write_text(SAMPLE)
    module = importlib.import_module("sample_of_tests")
    tests = [name for name in vars(module) if name.startswith("test_")]
    chosen = [test for test in tests if runs_on_second_version(test, module)]
    assert chosen == ["test_nothing", "test_claim", "test_inside", "test_two"]
    monkeypatch.setenv(EVERY_VERSION, "1")
    assert all(runs_on_second_version(test, module) for test in tests)


def test_a_second_version_is_one_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "wheel", lambda: Installation(Path("/wheel"), "18.6"))
    for system, kind in [("15.18", "postgresql15"), ("18.1", None)]:
        monkeypatch.setattr(installation, "system", lambda v=system: Installation(Path("/system"), v))
        assert second_postgresql() == kind
    monkeypatch.setattr(installation, "system", lambda: None)
    assert second_postgresql() is None
