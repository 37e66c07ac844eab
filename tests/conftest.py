"""Settings shared by all tests: the event loop they run on, how Hypothesis searches, and the stores that they use."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import turnstile
from tests.servers.postgresql import quick_place
from tests.servers.stores import KINDS, EmptyStores, empty_stores

# The folders of tests are in memory, where the servers are too: what outlives the death of its processes does so there,
# and a disk that is slow for a moment is not taken for a store that is. The variable is pytest's own.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(quick_place()))

settings.register_profile("dev", deadline=None, print_blob=True)
# The same examples on every run: a red run in CI is the change's doing, not the seed's.
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


LONGEST = ("conformance/test_model.py", "cli/test_demo.py", "test_docs.py", "client/test_transaction_crashes.py")
"""Files with single tests that take ten seconds and more."""
LONG = ("e2e/",)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let what takes long come first, else in any order: whoever is done early takes over from the end of the line, and
    small tests are shared best. Scenarios measure time, so they are not played beside each other but beside the rest.
    Those that must be alone come last: then nobody else takes long, and they need not wait.
    """
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("alone"):
            return 3
        file = item.path.relative_to(here).as_posix()
        return 0 if file.startswith(LONGEST) else 1 if file.startswith(LONG) else 2

    items.sort(key=place)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that all processes of this run have."""
    mine = tmp_path_factory.getbasetemp()
    return mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine


@pytest.fixture(autouse=True)
def _in_the_room(request: pytest.FixtureRequest, shared_folder: Path) -> Iterator[None]:
    """Beside others, or alone if the test is marked so."""
    with turnstile.entered(shared_folder, alone=request.node.get_closest_marker("alone") is not None):
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio alone: the only loop Fairlane supports."""
    return "asyncio"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that asks for a store of any kind on every kind, unless it says on which."""
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
