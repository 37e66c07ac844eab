"""Checks of a connection below the driver. Its socket is only accessible through the driver's private transport."""

from __future__ import annotations

import socket
from typing import Any

from ..shared import sockets
from .driver_errors import is_closed


def socket_of(connection: Any) -> socket.socket | None:
    """The socket of a connection."""
    transport = getattr(connection, "_transport", None)
    return transport.get_extra_info("socket") if transport is not None else None


def is_alive(connection: Any) -> bool:
    """Whether the connection is open and has no unrequested data from the server; closes it if it has."""
    if is_closed(connection):
        return False
    sock = socket_of(connection)
    if sock is None or sock.fileno() < 0 or sockets.is_silent(sock):
        return True
    connection.terminate()
    return False


def notice_silence(connection: Any) -> None:
    """Let the kernel detect that the server is gone."""
    sock = socket_of(connection)
    if sock is not None:
        sockets.notice_silence(sock)


def abort(connection: Any) -> None:
    """Shut the connection down without using its event loop."""
    sock = socket_of(connection)
    if sock is not None:
        sockets.abort(sock)
