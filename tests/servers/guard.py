"""Runs the programs of one test server, and ends them when the test process ends, however that ends.

The test process holds the other end of standard input. A line there is a program to run, as JSON; the answers are
``started PID`` and ``ended CODE``. An empty line, or the end of the input, which also comes when the test process was
killed, means that the server is no longer wanted: the program that runs is ended, and the server's folder is removed.

Nothing but the standard library, because it is started with ``-I -S``, in 20 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PATIENCE = 10.0
"""Seconds that a program has to end by itself."""
PR_SET_PDEATHSIG = 1


class Guard:
    """One folder, and the program that runs in it."""

    def __init__(self, folder: Path, account: tuple[int, int] | None, repair: list[str]) -> None:
        self._folder = folder
        self._account = account
        self._repair = repair
        self._program: subprocess.Popen[bytes] | None = None
        self._crashed = False

    def watch(self) -> None:
        """Execute the requests of the test process until there are no more."""
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        said = b""
        while True:
            readable, _, _ = select.select([0, wake], [], [])
            if wake in readable:
                os.read(wake, 4096)
                self._report()
            if 0 in readable:
                chunk = os.read(0, 65536)
                *lines, said = (said + chunk).split(b"\n")
                for line in lines:
                    if line:
                        self._start(json.loads(line))
                if not chunk or b"" in lines:
                    return

    def close(self) -> None:
        """End the program, and remove everything."""
        program = self._program
        if program is not None:
            family = [program.pid, *children_of(program.pid)]
            send(signal.SIGQUIT, program.pid)
            # A stopped process receives no signal before it continues.
            send(signal.SIGCONT, *family)
            try:
                program.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                send(signal.SIGKILL, *family)
                program.wait()
                self._crashed = True
        if self._crashed:
            # The next start would have removed the shared memory of a server that was killed. This is a short one.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._run(self._repair).wait(PATIENCE)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, order: dict[str, Any]) -> None:
        self._program = self._run(order["command"], order.get("input"))
        say(f"started {self._program.pid}")

    def _report(self) -> None:
        if self._program is not None and (code := self._program.poll()) is not None:
            self._crashed = code == -signal.SIGKILL
            self._program = None
            say(f"ended {code}")

    def _run(self, command: list[str], source: str | None = None) -> subprocess.Popen[bytes]:
        uid, gid = self._account or (None, None)
        with Path(source or os.devnull).open("rb") as stdin, (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self._folder,
                stdin=stdin,
                stdout=log,
                stderr=log,
                user=uid,
                group=gid,
                extra_groups=None if uid is None else [],
                preexec_fn=end_with_parent(),  # noqa: PLW1509  # there is but one thread
            )


def end_with_parent() -> Callable[[], None] | None:
    """Makes a program end even if the guard is killed, where the system can do that."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        # A shell that runs the tests in the background makes them ignore SIGQUIT; servers would take `PATIENCE` to end.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, int(signal.SIGQUIT))

    return ask


def children_of(parent: int) -> Iterator[int]:
    """The children of a process; none where there is no /proc."""
    with contextlib.suppress(OSError):
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError):
                if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    yield int(entry.name)


def send(number: signal.Signals, *pids: int) -> None:
    """Send a signal to processes that may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def say(text: str) -> None:
    """Send a message to the test process, if it still exists."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, text.encode() + b"\n")


def main(settings: str) -> None:
    """Guard the folder that the settings name."""
    given = json.loads(settings)
    account = tuple(given["account"]) if given["account"] else None
    guard = Guard(Path(given["folder"]), account, given["repair"])
    try:
        guard.watch()
    finally:
        guard.close()


if __name__ == "__main__":
    main(sys.argv[1])
