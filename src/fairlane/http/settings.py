"""Settings of the HTTP service: access, limits and deadlines."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from ..errors import InvalidInput
from ..model.job import MOST_BYTES_PER_ENQUEUE, MOST_JOBS_PER_CALL
from ..model.names import check_count, check_seconds

AccessMode = Literal["auto", "tokens", "open"]
COUNTS = ("body_bytes", "batch_bytes", "batch_jobs", "nesting", "header_bytes", "streams_per_caller", "streams")
DURATIONS = (
    *("longest_wait", "heartbeat", "slow_reader", "head_seconds", "body_seconds", "store_seconds", "token_seconds"),
    "sample",
)

HOST = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")
"""What a Host header can be without its port, in lower case."""


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Access rules, limits and deadlines of an HTTP service. Durations are in seconds."""

    access: AccessMode = "auto"
    """``auto``: a token is required once the store has one; before that only requests from this machine are accepted.
    ``tokens``: a token is always required. ``open``: no token is required, and every caller may do everything."""
    hosts: tuple[str, ...] | None = None
    """Accepted values of the Host header, without the port. None: the local names for requests without a token, any
    name for requests with one."""
    origins: tuple[str, ...] = ()
    """Other web origins, such as ``https://shop.example``, whose pages may call the service from a browser."""
    legacy: bool = True
    """Whether the legacy API, ``GET /task``, is served."""
    metrics: bool = True
    """Whether ``/metrics`` is served, if prometheus-client is installed."""
    dashboard: bool = True
    """Whether the dashboard is served at ``/``."""
    signals: bool = True
    """Whether SIGTERM and SIGINT end open streams, so that a graceful shutdown does not wait for them."""
    body_bytes: int = 1024 * 1024
    batch_bytes: int = MOST_BYTES_PER_ENQUEUE
    batch_jobs: int = MOST_JOBS_PER_CALL
    nesting: int = 64
    """The deepest nesting of arrays and objects in a JSON body."""
    header_bytes: int = 16 * 1024
    """The size of all headers of a request together. Path and query may have half of it."""
    streams_per_caller: int = 1_000
    """The most open event streams and long polls of one token."""
    streams: int = 5_000
    longest_wait: float = 60.0
    """The longest `wait` of a long poll."""
    heartbeat: float = 15.0
    """A silent stream gets a comment at this interval."""
    slow_reader: float = 10.0
    """A client that does not read its stream for this long is disconnected; one that reads nothing of another answer,
    after twice that, under uvicorn."""
    head_seconds: float = 10.0
    """How long the head of a request may take to arrive, under uvicorn."""
    body_seconds: float = 30.0
    """How long a body may take to arrive; for an NDJSON body, each line."""
    store_seconds: float = 2.0
    """How long the store may take to respond before the client gets 503."""
    token_seconds: float = 2.0
    """How long the list of tokens is cached: a revoked token works for at most this long."""
    sample: float = 1.0
    """The interval at which ``/events`` reads the queues, once for all listeners."""

    def __post_init__(self) -> None:
        if self.access not in ("auto", "tokens", "open"):
            raise InvalidInput("access", "must be 'auto', 'tokens' or 'open'")
        for field in COUNTS:
            check_count(field, getattr(self, field), least=1)
        for field in DURATIONS:
            check_seconds(field, getattr(self, field), least=0.001)
        if self.batch_jobs > MOST_JOBS_PER_CALL:
            raise InvalidInput("batch_jobs", f"must be at most {MOST_JOBS_PER_CALL}")
        for host in self.hosts or ():
            if not HOST.fullmatch(host):
                example = "such as shop.example or [::1], in lower case, without scheme, port or path"
                raise InvalidInput("hosts", f"{host!r} must be a host name or an address, {example}")
        for origin in self.origins:
            if "://" not in origin or origin.endswith("/"):
                raise InvalidInput("origins", f"{origin!r} must be scheme://host[:port], without a path")
