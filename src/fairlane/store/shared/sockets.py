"""What can be learned of a connection below its driver: whether the other side is still there."""

from __future__ import annotations

import contextlib
import os
import select
import socket

UNANSWERED_SECONDS = 5.0
"""A server that does not even acknowledge what was sent is gone: a host that died, or a router that forgot us."""


def is_silent(line: socket.socket) -> bool:
    """Whether the server has sent nothing that was not read yet.

    What it sends by itself is nearly always that this is the end. An event loop that was busy has not read that yet,
    and would send a call into nowhere.
    """
    poll = select.poll()
    poll.register(line.fileno(), select.POLLIN | select.POLLHUP)
    return not poll.poll(0)


def notice_silence(line: socket.socket) -> None:
    """Let the kernel find out that the other side has vanished, in use and while nobody uses it."""
    if line.family == socket.AF_UNIX:
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


def hang_up(line: socket.socket) -> None:
    """Tell the other side that nobody is here any more, without an event loop."""
    # On a copy, because what uvloop hands out cannot be shut down.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)
