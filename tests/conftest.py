"""Settings shared by all tests: the event loop they run on, and how Hypothesis searches."""

import os

import pytest
from hypothesis import settings

settings.register_profile("dev", deadline=None, print_blob=True)
# The same examples on every run: a red run in CI is the change's doing, not the seed's.
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio alone: the only loop Fairlane supports."""
    return "asyncio"
