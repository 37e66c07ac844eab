"""A test that asks to run alone does."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.turnstile import entered

SOON, PATIENCE = 0.2, 30.0


class Guest(threading.Thread):
    """Enters the room, and stays until it is told to leave."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        super().__init__(daemon=True)
        self._folder, self._alone = folder, alone
        self.is_in, self.may_leave = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with entered(self._folder, alone=self._alone):
            self.is_in.set()
            self.may_leave.wait(PATIENCE)

    def leave(self) -> None:
        self.may_leave.set()
        self.join(PATIENCE)


def test_a_test_that_is_alone_waits_for_others_and_others_wait_for_it(tmp_path: Path) -> None:
    others = [Guest(tmp_path, alone=False) for _ in range(2)]
    assert all(other.is_in.wait(PATIENCE) for other in others)
    alone = Guest(tmp_path, alone=True)
    assert not alone.is_in.wait(SOON)
    late = Guest(tmp_path, alone=False)
    others[0].leave()
    assert not alone.is_in.wait(SOON)
    others[1].leave()
    assert alone.is_in.wait(PATIENCE)
    assert not late.is_in.wait(SOON)
    alone.leave()
    assert late.is_in.wait(PATIENCE)
    late.leave()
