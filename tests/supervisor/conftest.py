"""A fleet for every test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fairlane import open_store

from .fleet import Fleet


@pytest.fixture
async def fleet(store_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    """A store of its own, on the real clock, that several processes share."""
    store = await open_store(store_url)
    folder = tmp_path / "seen"
    folder.mkdir()
    yield Fleet(store, store_url, folder)
    await store.close()
