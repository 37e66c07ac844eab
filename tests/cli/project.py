"""A user's project directory: modules, a store, and the command line run inside it, in this process or in another."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from click.testing import CliRunner, Result

from fairlane import Fairlane
from fairlane.cli.main import fairlane
from fairlane.store.port import Store

T = TypeVar("T")

SHOP = """
import asyncio
from fairlane import Fairlane

app = Fairlane()
app.queue("models").lane("*", limit=1)

@app.task(queue="images", lane="user:{user}")
async def render(user: str, prompt: str = "a cat") -> str:
    return f"{user}: {prompt}"

@app.task(queue="images", retries=0)
async def spoil(text: str) -> None:
    raise ValueError(text)

@app.task(queue="slow")
async def nap(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "rested"
"""

SHORT_INTERVALS = {
    "FAIRLANE_HEARTBEAT": "0.3",
    "FAIRLANE_LEASE": "3",
    "FAIRLANE_STAND": "0.2",
    "FAIRLANE_PROMOTE": "0.2",
    "FAIRLANE_POLL": "0.2",
}


class Project:
    """A directory in which commands are run. Nothing of it stays behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path / 'fairlane.db'}"
        self._processes: list[subprocess.Popen[str]] = []

    def write(self, name: str, text: str) -> None:
        """Put a file there."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def make_store(self) -> None:
        """Create the store, as the first worker or enqueue does: commands that only read do not."""

        async def nothing(store: Store) -> None: ...

        asyncio.run(self.with_store(nothing))

    def run(self, *args: str, stdin: str | None = None) -> Result:
        """Run a command in this process. A worker sets up its log: other tests must not see that."""
        root = logging.getLogger()
        level, handlers = root.level, root.handlers[:]
        try:
            return CliRunner().invoke(fairlane, list(args), input=stdin)
        finally:
            root.setLevel(level)
            root.handlers[:] = handlers

    def good(self, *args: str) -> str:
        """The output of a command that must succeed."""
        result = self.run(*args)
        assert result.exit_code == 0, result.output
        return result.stdout

    def read(self, *args: str) -> Any:
        """The JSON document that a command prints with ``--json``."""
        return json.loads(self.good(*args, "--json"))

    def refused(self, *args: str, code: int = 2) -> str:
        """The error of a command that must fail: one line, and no traceback."""
        result = self.run(*args)
        assert result.exit_code == code, result.output
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        return result.stderr

    # -- other processes -----------------------------------------------------------------------------------------

    def start(self, *args: str, **environ: str) -> subprocess.Popen[str]:
        """Start a command as a process of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", "fairlane", *args],
            cwd=self.path,
            env=os.environ | SHORT_INTERVALS | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def stop(self, process: subprocess.Popen[str], number: int = signal.SIGTERM) -> str:
        """Stop a process gracefully and return what it wrote to standard error."""
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        return error

    def clear(self) -> None:
        """End whatever a failed test has left."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
                try:
                    process.communicate(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.communicate()

    # -- the store -------------------------------------------------------------------------------------------------

    async def with_store(self, use: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine function with the project's store."""
        async with Fairlane(self.url) as app:
            return await use(await app.connection.store())


def eventually(look: Callable[[], T], *, within: float = 60.0) -> T:
    """Call `look` until it returns a true value, and return that."""
    until = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.1)
    return found
