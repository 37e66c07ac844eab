"""Serves `tests.http.strict` in a process, for tests that talk to it by sockets."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from .conftest import API

ROOT = Path(__file__).resolve().parents[2]
SMALL = 4_096
"""Bytes of a kernel buffer: what is not read reaches the server's own buffers soon."""


class Strict:
    """A server process of `tests.http.strict` whose connections have small buffers."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port
        self.base = f"http://127.0.0.1:{port}{API}"

    def connect(self) -> socket.socket:
        """A connection with a small receive buffer."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        client.settimeout(20)
        client.connect(("127.0.0.1", self.port))
        return client

    def ask(self, path: str) -> socket.socket:
        """A request whose answer is never read."""
        client = self.connect()
        client.sendall(f"GET {API}{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return client

    @property
    def memory(self) -> int:
        """Bytes in memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def strict(url: str, log: Path, *options: str, module: str = "strict") -> Iterator[Strict]:
    with socket.create_server(("127.0.0.1", 0)) as listening, log.open("wb") as output:
        # Accepted connections inherit it.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        command = [
            sys.executable,
            "-m",
            "uvicorn",
            f"tests.http.{module}:web",
            "--fd",
            str(listening.fileno()),
            *options,
        ]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "FAIRLANE_URL": url, "FAIRLANE_GRACE": "1"},
            pass_fds=[listening.fileno()],
            stdout=output,
            stderr=output,
        )
        port = listening.getsockname()[1]
        try:
            # The socket listens already: the request waits there until the server has started.
            assert httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=30).status_code == 200, log.read_text()
            yield Strict(process, port)
        finally:
            process.kill()
            process.wait()


def closed(client: socket.socket) -> bool:
    """Whether the server has ended the connection, found out without reading from it."""
    poll = select.poll()
    poll.register(client, 0)
    return bool(poll.poll(0))
