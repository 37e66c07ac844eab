"""A yard for every test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .yard import Yard, yard_at


@pytest.fixture
async def yard(store_url: str) -> AsyncIterator[Yard]:
    """A store of its own, on the real clock, with quick intervals."""
    async with yard_at(store_url) as opened:
        yield opened
