"""What can be learned of a connection below the driver, which has no way to its socket but the transport."""

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
    """Whether the connection is open, and the server has sent nothing on it unasked."""
    if is_closed(connection):
        return False
    sock = socket_of(connection)
    if sock is None or sock.fileno() < 0 or sockets.is_silent(sock):
        return True
    connection.terminate()
    return False


def notice_silence(connection: Any) -> None:
    """Let the kernel find out that the other side has vanished."""
    sock = socket_of(connection)
    if sock is not None:
        sockets.notice_silence(sock)


def abort(connection: Any) -> None:
    """Close the connection for the other side too, without an event loop."""
    sock = socket_of(connection)
    if sock is not None:
        sockets.abort(sock)
