"""Python programs as forks of a process that has imported what all of them need: started in 10 ms of processor time,
not in 400, and otherwise like ``python -m module``.

The process that forks is started when the first program is, and ends with the test process. It has no thread and has
drawn no random number, so its forks have nothing in common but the code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODULES = (
    *("asyncio", "ctypes", "random", "sqlite3", "asyncpg", "rich.console"),
    *("fairlane", "fairlane.cli.main", "fairlane.cli.worker", "fairlane.cli.manager", "fairlane.manager.manager"),
    *("fairlane.worker.worker", "fairlane.supervisor.supervisor"),
    *("fairlane.store.sqlite.store", "fairlane.store.postgresql.store"),
    *("uvicorn", "uvicorn.main", "fairlane.http.application", "fairlane.http.instance"),
)
"""No module that reads the environment when it is imported: each fork has its own."""


class Fork:
    """A program, with the methods of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str] = os.environ,
        source: Path = Path(os.devnull),
        output: Path = Path(os.devnull),
    ) -> None:
        """`source` is its standard input; its output and errors are appended to `output`."""
        self._source = _source()
        self.pid = self._source.fork(
            module=module, arguments=[*arguments], env=dict(env), source=str(source), output=str(output)
        )

    def poll(self) -> int | None:
        """Its exit code; None while it runs, negative if a signal ended it."""
        return self._source.ended(self.pid)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._source.wait(self.pid)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it is known to have ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Source:
    """The process that forks, from the side of the tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A Ctrl-C in the terminal is for the tests.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._news = self._process.stdin, self._process.stdout
        self._said = b""
        self._codes: dict[int, int] = {}
        atexit.register(self.close, os.getpid())

    def close(self, owner: int) -> None:
        """End it, unless this process is a fork of its owner. Programs that still run are not ended."""
        if os.getpid() == owner:
            self._orders.close()
            self._process.wait()
            self._news.close()

    def fork(self, **order: Any) -> int:
        """Start a program, with the arguments of `become`. Returns its process id."""
        self._orders.write(json.dumps(order).encode() + b"\n")
        self._orders.flush()
        while True:
            news = self._next(None)
            assert news is not None
            if "started" in news:
                # An earlier program that has ended may have had the same id.
                self._codes.pop(news["started"], None)
                return news["started"]

    def ended(self, pid: int) -> int | None:
        """The exit code of a program that has ended."""
        while pid not in self._codes and self._next(0.0) is not None:
            pass
        return self._codes.get(pid)

    def wait(self, pid: int) -> int:
        """The exit code of a program, once it has ended."""
        while pid not in self._codes:
            self._next(None)
        return self._codes[pid]

    def _next(self, patience: float | None) -> dict[str, int] | None:
        """The next message of the process; None if there is none within `patience` seconds."""
        while b"\n" not in self._said:
            if not select.select([self._news], [], [], patience)[0]:
                return None
            chunk = os.read(self._news.fileno(), 65_536)
            assert chunk, "the process that forks has ended"
            self._said += chunk
        line, self._said = self._said.split(b"\n", 1)
        news: dict[str, int] = json.loads(line)
        if "ended" in news:
            self._codes[news["ended"]] = news["code"]
        return news


@functools.cache
def _source() -> Source:
    return Source()


# -- the process that forks ------------------------------------------------------------------------------------------


def main() -> None:
    """Fork on request. A fork leaves the loop and becomes the requested program."""
    for module in MODULES:
        import_module(module)
    gc.freeze()
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    said = b""
    while True:
        readable, _, _ = select.select([0, wake], [], [])
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 65_536)
            collect()
        if 0 in readable:
            chunk = os.read(0, 65_536)
            if not chunk:
                return
            said += chunk
            while b"\n" in said:
                line, said = said.split(b"\n", 1)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(wake)
                    os.close(waker)
                    become(**json.loads(line))
                    return
                tell(started=pid)


def collect() -> None:
    """Report programs that have ended."""
    with contextlib.suppress(ChildProcessError):
        while (status := os.waitpid(-1, os.WNOHANG))[0]:
            tell(ended=status[0], code=os.waitstatus_to_exitcode(status[1]))


def tell(**news: int) -> None:
    """Send a message to the tests."""
    os.write(1, json.dumps(news).encode() + b"\n")


def become(module: str, arguments: list[str], env: dict[str, str], source: str, output: str) -> None:
    """Run a program: in a session of its own, with its own environment, input and output."""
    os.setsid()
    # A shell that runs the tests in the background makes them ignore SIGINT, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, flags, numbers in (
        (source, os.O_RDONLY, [0]),
        (output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, [1, 2]),
    ):
        file = os.open(path, flags, 0o644)
        for number in numbers:
            os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
