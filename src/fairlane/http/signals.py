"""Signals that stop a server, noticed before the server's own handler runs.

A server waits for open requests and connections before it ends the lifespan of the application. Without this, streams
would stay open and an embedded worker would keep claiming jobs all that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def before_server(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` in the event loop at each signal that stops the server; then the server's own handler runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(call)
        before[signal.Signals(number)](number, frame)

    for each in SIGNALS:
        present = signal.getsignal(each)
        # Without a server's handler the signal must keep its default effect, or nothing would stop the program.
        if callable(present) and present is not signal.default_int_handler:
            before[each] = present
            signal.signal(each, handle)
    try:
        yield
    finally:
        for each, handler in before.items():
            if signal.getsignal(each) is handle:
                signal.signal(each, handler)
