"""What the HTTP service allows: limits, deadlines, and who may call."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import InvalidInput
from ..model.job import MOST_BYTES_PER_ENQUEUE, MOST_JOBS_PER_CALL
from ..model.names import check_count, check_seconds

AccessMode = Literal["auto", "tokens", "open"]
COUNTS = ("body_bytes", "batch_bytes", "batch_jobs", "nesting", "header_bytes", "streams_per_caller", "streams")
DURATIONS = ("longest_wait", "heartbeat", "slow_reader", "body_seconds", "store_seconds", "token_seconds", "sample")


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and rules of one HTTP service. Durations are in seconds."""

    access: AccessMode = "auto"
    """``auto``: a token is required as soon as the store has one; before that only requests of this machine are
    answered. ``tokens``: a token is always required. ``open``: everybody who reaches the port may do everything."""
    hosts: tuple[str, ...] | None = None
    """Names by which the service may be addressed (the Host header, without the port). None: this machine's own names
    for requests without a token, any name for requests with one."""
    origins: tuple[str, ...] = ()
    """Other web origins, such as ``https://shop.example``, whose pages may call from a browser."""
    legacy: bool = True
    """Whether ``GET /task`` of the small old API is answered."""
    metrics: bool = True
    """Whether ``/metrics`` counts, if prometheus-client is installed."""
    signals: bool = True
    """Whether SIGTERM and SIGINT end open streams, so that the server's graceful stop need not wait for them."""
    body_bytes: int = 1024 * 1024
    batch_bytes: int = MOST_BYTES_PER_ENQUEUE
    batch_jobs: int = MOST_JOBS_PER_CALL
    nesting: int = 64
    """Arrays and objects inside each other in a JSON body."""
    header_bytes: int = 16 * 1024
    """All headers of a request together; the path and query have half of it."""
    streams_per_caller: int = 1_000
    """Open event streams and long polls of one token."""
    streams: int = 5_000
    longest_wait: float = 60.0
    """The longest `wait` of a long poll."""
    heartbeat: float = 15.0
    """A stream that is silent for so long gets a comment."""
    slow_reader: float = 10.0
    """A client that takes longer than this to read what was sent is disconnected."""
    body_seconds: float = 30.0
    """How long a body may take to arrive; of an NDJSON body, each line."""
    store_seconds: float = 2.0
    """How long the store may take to answer before the client gets 503."""
    token_seconds: float = 2.0
    """How long a list of tokens is used before it is read again: a revoked token works for this long at most."""
    sample: float = 1.0
    """The interval at which ``/events`` looks at the queues, once for all of its listeners."""

    def __post_init__(self) -> None:
        if self.access not in ("auto", "tokens", "open"):
            raise InvalidInput("access", "is none of 'auto', 'tokens', 'open'")
        for field in COUNTS:
            check_count(field, getattr(self, field), least=1)
        for field in DURATIONS:
            check_seconds(field, getattr(self, field), least=0.001)
        if self.batch_jobs > MOST_JOBS_PER_CALL:
            raise InvalidInput("batch_jobs", f"at most {MOST_JOBS_PER_CALL} jobs are stored together")
        for origin in self.origins:
            if "://" not in origin or origin.endswith("/"):
                raise InvalidInput("origins", f"{origin!r} must be scheme://host[:port], without a path")
