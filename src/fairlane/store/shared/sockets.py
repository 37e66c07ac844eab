"""Checks of a connection below its driver: whether the server is still there."""

from __future__ import annotations

import contextlib
import os
import select
import socket

UNANSWERED_SECONDS = 5.0
"""Time after which data that is not acknowledged means that the server or the route to it is gone."""


def is_silent(connection: socket.socket) -> bool:
    """Return whether there is no unread data from the server.

    Unrequested data nearly always is the end of the connection. A busy event loop has not read it yet, and would send a
    call on a dead connection.
    """
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN | select.POLLHUP)
    return not poll.poll(0)


def notice_silence(connection: socket.socket) -> None:
    """Let the kernel detect that the server is gone, during a call and on an idle connection."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(UNANSWERED_SECONDS * 1000)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def abort(connection: socket.socket) -> None:
    """Shut down a connection without its event loop."""
    # On a copy, because the sockets that uvloop returns cannot be shut down.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)
