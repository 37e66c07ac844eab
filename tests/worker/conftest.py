"""A yard for every test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .yard import Yard, yard_at


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    """A store of its own, on the real clock, with quick intervals."""
    async with yard_at(tmp_path) as opened:
        yield opened
