"""Settings shared by all tests: markers, order, the event loop, how Hypothesis searches, and the stores under test."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import turnstile
from tests.servers.postgresql import quick_place
from tests.servers.stores import COMPOSED, KINDS, EmptyStores, empty_stores

# Temporary folders are in memory, like the servers: they survive the death of a process all the same, and a disk that
# is slow for a moment is not mistaken for a slow store. The variable is pytest's own.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(quick_place()))

settings.register_profile("dev", deadline=None, print_blob=True)
# The same examples on every run: a failure in CI is caused by the change, not by the seed.
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


HERE = Path(__file__).parent
LONGEST = ("conformance/test_model.py", "cli/test_demo.py", "test_docs.py", "client/test_transaction_crashes.py")
"""Files with single tests that take ten seconds and more."""
LONG = ("e2e/",)
KIND = re.compile(rf"({'|'.join((COMPOSED, *KINDS))})(?:-\w+|[\d.]+)?")
"""A parameter that names a kind of store, such as ``redis``, ``postgresql15`` or ``postgresql-system``."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test with the kinds of store that it runs on: by its parameters and by its folder."""
    kinds = {found for found in item.path.relative_to(HERE).parts[:2] if found in (COMPOSED, *KINDS)}
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        matches = [KIND.fullmatch(value) for value in item.callspec.params.values() if isinstance(value, str)]
        kinds |= {match[1] for match in matches if match is not None}
    for kind in sorted(kinds):
        item.add_marker(kind)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest tests first and keep the random order otherwise: worksteal balances small tests best at the end.

    Those that measure and are marked `alone` come before all others. They and the long ones are then in the share of
    one process, so that a measurement waits for small tests only, and no long test waits for a measurement.
    """

    def rank(item: pytest.Item) -> int:
        if item.get_closest_marker("alone"):
            return 0
        file = item.path.relative_to(HERE).as_posix()
        return 1 if file.startswith(LONGEST) else 2 if file.startswith(LONG) else 3

    items.sort(key=rank)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run share."""
    mine = tmp_path_factory.getbasetemp()
    return mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine


@pytest.fixture(autouse=True)
def _exclusion(request: pytest.FixtureRequest, shared_folder: Path) -> Iterator[None]:
    """Run beside other tests, or alone if the test is marked so."""
    with turnstile.entered(shared_folder, alone=request.node.get_closest_marker("alone") is not None):
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio, the only event loop library that Fairlane supports."""
    return "asyncio"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that requests `store_kind` on every kind, unless it names the kinds itself."""
    chosen = any(mark.args[0] == "store_kind" for mark in metafunc.definition.iter_markers("parametrize"))
    if "store_kind" in metafunc.fixturenames and not chosen:
        metafunc.parametrize("store_kind", KINDS, indirect=True)


@pytest.fixture
def store_kind(request: pytest.FixtureRequest) -> str:
    """The kind of store that a test runs on."""
    return str(request.param)


@pytest.fixture
def stores(store_kind: str, tmp_path: Path) -> Iterator[EmptyStores]:
    """Empty stores of that kind."""
    with empty_stores(store_kind, tmp_path) as given:
        yield given


@pytest.fixture
def store_url(stores: EmptyStores) -> str:
    """The URL of an empty store."""
    return stores.next()
