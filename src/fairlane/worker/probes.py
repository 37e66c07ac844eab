"""The HTTP port of a worker: ``/metrics`` for Prometheus, ``/healthz`` and ``/readyz`` for process monitors.

``/healthz`` answers 200 while the process can answer at all. ``/readyz`` answers 200 while the worker is registered,
claims and reaches its store, and otherwise 503 with the reason. Each request has a thread of its own, so a store that
does not answer delays only that request.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ..errors import FairlaneError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

STORE_SECONDS = 2.0
"""How long the store may take to answer. Probes come every few seconds, and have a deadline of their own."""


class Readiness:
    """Whether a worker can do its work now."""

    def __init__(self, unready: Callable[[], str | None], read: Callable[[], object]) -> None:
        """`unready` returns what keeps the worker from claiming, None when nothing does; `read` reads the store."""
        self._unready = unready
        self._read = read
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="fairlane-readyz")

    def problem(self) -> str | None:
        """Why the worker is not ready; None when it is."""
        found = self._unready()
        if found is not None:
            return found
        try:
            self._reading.submit(self._read).result(STORE_SECONDS)
        except TimeoutError:
            return f"the store did not answer within {STORE_SECONDS:g} s"
        except FairlaneError as exc:
            return f"the store cannot be read ({type(exc).__name__})"
        return None

    def close(self) -> None:
        """End the thread that reads the store."""
        self._reading.shutdown(wait=False, cancel_futures=True)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a probe comes every few seconds."""


def serve(
    metrics: WSGIApplication, port: int, host: str = "127.0.0.1", readiness: Readiness | None = None
) -> Callable[[], None]:
    """Serve in a thread. Returns a function that stops it; raises `OSError` for an address that is not available."""

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/healthz":
            return _plain(start, None)
        if path == "/readyz" and readiness is not None:
            return _plain(start, readiness.problem())
        return metrics(environ, start)

    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    kind = _Server6 if family == socket.AF_INET6 else _Server
    server = make_server(host, port, answer, kind, _Quiet)
    thread = threading.Thread(target=server.serve_forever, name="fairlane-http", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()
        if readiness is not None:
            readiness.close()

    return stop


def _plain(start: StartResponse, problem: str | None) -> list[bytes]:
    status = "200 OK" if problem is None else "503 Service Unavailable"
    start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")])
    return [f"{problem or 'ok'}\n".encode()]
