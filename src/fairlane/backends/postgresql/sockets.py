"""What can be learned of a connection below the driver: whether the other side is still there.

The driver has no way to its socket but the transport, and the options of the kernel no other way at all.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Any

from .failures import is_closed

UNANSWERED_SECONDS = 5.0
"""A server that does not even acknowledge what was sent is gone: a host that died, or a router that forgot us."""


def socket_of(connection: Any) -> socket.socket | None:
    """The socket of a connection."""
    transport = getattr(connection, "_transport", None)
    return transport.get_extra_info("socket") if transport is not None else None


def is_alive(connection: Any) -> bool:
    """Whether the connection is open, and the server has sent nothing on it while nobody asked.

    What it sends by itself is nearly always that this is the end. An event loop that was busy has not read that yet,
    and would send a call into nowhere.
    """
    if is_closed(connection):
        return False
    line = socket_of(connection)
    if line is None or line.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(line.fileno(), select.POLLIN | select.POLLHUP)
    if not poll.poll(0):
        return True
    connection.terminate()
    return False


def notice_silence(connection: Any) -> None:
    """Let the kernel find out that the other side has vanished, in use and while nobody uses it."""
    line = socket_of(connection)
    if line is None or line.family == socket.AF_UNIX:
        return
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(UNANSWERED_SECONDS * 1000)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            line.setsockopt(socket.IPPROTO_TCP, option, value)


def hang_up(connection: Any) -> None:
    """Tell the other side that nobody is here any more, without an event loop."""
    line = socket_of(connection)
    if line is not None:
        # On a copy, because what uvloop hands out cannot be shut down.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)
