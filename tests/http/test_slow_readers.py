"""Clients of real sockets that stop reading: they are disconnected, and what is kept for them is bounded."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from .conftest import API
from .test_serve import ROOT, events_of

pytestmark = pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
SMALL = 4_096
"""Bytes of a kernel buffer: what is not read reaches the server's own buffers soon."""
READERS = 60
MOST_BYTES = 256 * 1024
"""What one stream may keep: uvicorn's buffer of 64 KiB, one event of 15 KB, and the objects of a connection."""


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
        """A request whose answer nobody reads."""
        client = self.connect()
        client.sendall(f"GET {API}{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return client

    @property
    def memory(self) -> int:
        """Bytes in memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def strict(url: str, log: Path, *options: str) -> Iterator[Strict]:
    with socket.create_server(("127.0.0.1", 0)) as listening, log.open("wb") as output:
        # Accepted connections inherit it.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        command = [sys.executable, "-m", "uvicorn", "tests.http.strict:web", "--fd", str(listening.fileno()), *options]
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


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_streams_that_nobody_reads_are_ended_on_real_sockets(store_url: str, tmp_path: Path, loop: str) -> None:
    log = tmp_path / "log"
    with strict(store_url, log, "--loop", loop) as server, ExitStack() as opened, httpx.Client(timeout=20) as http:
        id = http.post(f"{server.base}/jobs", json={"task": "chatter", "args": [60]}).json()["id"]
        with http.stream("GET", f"{server.base}/jobs/{id}/events") as response:
            events = events_of(response)
            next(event for event in events if event[0] == "progress")
            before = server.memory
            readers = [opened.enter_context(server.ask(f"/jobs/{id}/events")) for _ in range(READERS)]
            end = time.monotonic() + 20
            most = 0
            while not all(map(closed, readers)):
                assert time.monotonic() < end, f"{sum(map(closed, readers))} of {READERS} are closed"
                next(events)
                most = max(most, server.memory - before)
            assert most < READERS * MOST_BYTES
            assert next(events)[1]["state"] == "running", "a client that reads keeps its stream"
        told = log.read_text()
        assert "Traceback" not in told
        assert "without completing" not in told, "an error for an operator who can do nothing about it"
        # A connection that waited to be read would keep the server from stopping.
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) in (0, -signal.SIGTERM)


def test_lines_whose_answers_nobody_reads_are_ended_on_a_real_socket(store_url: str, tmp_path: Path) -> None:
    lines = b'{"task":"unknown"}\n' * 500
    with strict(store_url, tmp_path / "log") as server, server.connect() as client:
        head = ("Host: localhost", "Content-Type: application/x-ndjson", "Transfer-Encoding: chunked")
        client.sendall("\r\n".join((f"POST {API}/jobs:batch HTTP/1.1", *head, "", "")).encode())
        before = server.memory
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_forever(client, b"%x\r\n%b\r\n" % (len(lines), lines))
        assert server.memory - before < 8 * 1024 * 1024
        assert httpx.get(f"{server.base}/jobs", timeout=20).json()["jobs"] == []


def send_forever(client: socket.socket, part: bytes) -> None:
    """Send until the connection breaks; one that takes nothing for long is a `TimeoutError`."""
    while True:
        client.sendall(part)
