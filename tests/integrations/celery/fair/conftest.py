"""Workers that the tests share, one for each pool."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .site import Site

POOLS = {"prefork": 2, "threads": 3}


@pytest.fixture(scope="session", params=list(POOLS))
def pool(request: pytest.FixtureRequest) -> str:
    """The pool of the shared worker."""
    return str(request.param)


@pytest.fixture(scope="session")
def site(pool: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A shop with one worker that serves its fair queues, and one of the broker."""
    made = Site(tmp_path_factory.mktemp(pool))
    try:
        made.worker("-P", pool, "-c", str(POOLS[pool]), "-Q", "celery,other,brokered")
        yield made
    finally:
        made.close()


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """A shop without workers."""
    made = Site(tmp_path)
    try:
        yield made
    finally:
        made.close()
