"""The pytest plugin: the fixture `fairlane_lab`. Tests that do not use it are not affected.

def test_a_signup_sends_one_mail(fairlane_lab: MakeLab) -> None:
    lab = fairlane_lab(app).blocking
    sign_up("ann@x")
    assert lab.drain().completed == 1

async def test_the_same_with_an_event_loop(fairlane_lab: MakeLab) -> None:
    lab = fairlane_lab(app)
    await sign_up_soon("ann@x")
    assert (await lab.drain()).completed == 1
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from ..app import Fairlane
    from ..store.clock import ManualClock
    from ..testing import Lab
    from ..testing.lab import Isolate, Workers


class MakeLab(Protocol):
    """The value of the fixture: call it with the application. The options are those of `testing.embedded`."""

    def __call__(
        self, app: Fairlane, *, clock: ManualClock | None = None, workers: Workers = 1, isolate: Isolate = "inline"
    ) -> Lab:
        """Put the application into a lab until the test ends."""


@pytest.fixture
def fairlane_lab() -> Iterator[MakeLab]:
    """Put an application into a lab for this test: ``lab = fairlane_lab(app)``; in a sync test use ``lab.blocking``."""
    from ..testing.lab import laid_out

    with ExitStack() as labs:

        def make(
            app: Fairlane, *, clock: ManualClock | None = None, workers: Workers = 1, isolate: Isolate = "inline"
        ) -> Lab:
            return labs.enter_context(laid_out(app, clock=clock, workers=workers, isolate=isolate))

        yield make
