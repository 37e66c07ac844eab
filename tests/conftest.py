"""Settings shared by all tests: the event loop they run on, how Hypothesis searches, and the stores that they use."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.servers.stores import KINDS, EmptyStores, empty_stores

settings.register_profile("dev", deadline=None, print_blob=True)
# The same examples on every run: a red run in CI is the change's doing, not the seed's.
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio alone: the only loop Fairlane supports."""
    return "asyncio"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that asks for a store of any kind on every kind."""
    if "store_kind" in metafunc.fixturenames:
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
