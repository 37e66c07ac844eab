"""A yard for every test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fairlane import Fairlane, Settings

from .yard import QUICK, Yard, yard_at


@pytest.fixture
async def yard(store_url: str) -> AsyncIterator[Yard]:
    """A store of its own, on the real clock, with quick intervals."""
    async with yard_at(store_url) as opened:
        yield opened


@pytest.fixture
async def app(store_url: str) -> AsyncIterator[Fairlane]:
    """An application with a store of its own, with quick intervals."""
    made = Fairlane(settings=Settings(url=store_url, intervals=QUICK))
    yield made
    await made.close()
