"""What commands show only on a terminal."""

import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Callable

from tests.cli.project import Project
from tests.interrupts import interruptible


class Terminal:
    """A command on a terminal."""

    def __init__(self, project: Project, *args: str) -> None:
        self._leader, follower = pty.openpty()
        self.before = termios.tcgetattr(follower)
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        self._follower = follower
        with interruptible():
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fairlane", *args],
                cwd=project.path,
                stdin=follower,
                stdout=follower,
                stderr=follower,
                env=environ,
            )
        os.set_blocking(self._leader, False)
        self.shown = ""

    def until(self, satisfied: Callable[[str], bool]) -> None:
        """Read output until it satisfies the condition."""
        end = time.monotonic() + 60
        while not satisfied(self.shown):
            assert time.monotonic() < end, self.shown
            try:
                self.shown += os.read(self._leader, 65_536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.05)

    def press(self, keys: str) -> None:
        """Type keys."""
        os.write(self._leader, keys.encode())

    def modes(self) -> list[object]:
        """The modes of the terminal."""
        return termios.tcgetattr(self._follower)

    def close(self) -> None:
        """Kill it, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._leader)
        os.close(self._follower)


def test_top_is_live_and_q_ends_it(project: Project) -> None:
    terminal = Terminal(project, "top")
    try:
        terminal.until(lambda shown: "no queues in sqlite:///" in shown)
        project.good("enqueue", "any.task", "--queue", "fresh", "--lane", "user:ann")
        terminal.until(lambda shown: "fresh" in shown and "user:ann" in shown)
        terminal.press("q")
        assert terminal.process.wait(timeout=60) == 0
        assert terminal.modes() == terminal.before
    finally:
        terminal.close()


def test_ctrl_c_ends_top_as_well(project: Project) -> None:
    terminal = Terminal(project, "top")
    try:
        terminal.until(lambda shown: "q quits" in shown)
        terminal.process.send_signal(2)
        assert terminal.process.wait(timeout=60) == 0
        assert terminal.modes() == terminal.before
    finally:
        terminal.close()


def test_a_worker_shows_a_terminal_what_it_serves(project: Project) -> None:
    terminal = Terminal(project, "worker", "-A", "shop", "-c", "4")
    try:
        terminal.until(lambda shown: "is ready" in shown)
        for part in ("worker default/0", "sqlite:///fairlane.db", "images", "1 reserved for high", "shop.render"):
            assert part in terminal.shown
        terminal.process.terminate()
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.close()


def test_waiting_for_a_result_shows_why_on_a_terminal(project: Project) -> None:
    terminal = Terminal(project, "enqueue", "-A", "shop", "render", "ann", "--wait")
    try:
        terminal.until(lambda shown: "no live worker serves queue images" in shown)
        worker = project.start("worker", "-A", "shop", "--log-level", "warning")
        terminal.until(lambda shown: "ann: a cat" in shown)
        assert terminal.process.wait(timeout=60) == 0
        project.stop(worker)
    finally:
        terminal.close()
