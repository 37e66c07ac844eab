"""Fleets of Celery workers on the Valkey server of the test process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.servers.valkey import server

from .fleet import Fleet, fleet_of

MakeFleet = Callable[..., Fleet]


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[MakeFleet]:
    """Create fleets of a number of queues, each with a namespace of its own."""
    with ExitStack() as stack:

        def make(queues: int, **more: Any) -> Fleet:
            return stack.enter_context(fleet_of(server(), tmp_path, queues, **more))

        yield make
