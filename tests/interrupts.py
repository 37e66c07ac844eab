"""Ctrl-C for programs that tests start."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let programs that are started inside the block end by SIGINT, as in a terminal.

    A shell that runs the tests in the background lets them ignore it, and their child processes inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
