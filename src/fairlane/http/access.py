"""Identifies the caller of a request and checks what it may do.

Access is denied by default: an operation names the scope that it requires, and a token that is bound to queues or to a
lane prefix is rejected by every operation that does not check these bounds itself. Tokens are read from the store at
most every few seconds, not once per request. Only digests are compared, in constant time.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

import msgspec
from starlette.types import Scope as Connection

from ..errors import FairlaneError
from ..model import tokens
from ..model.job import Job, NewJob
from ..model.tokens import AccessToken
from .problems import Problem
from .settings import HttpSettings

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
FORWARDING = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})
"""Headers of a proxy: the request came from another machine although its peer address is local."""


COOKIE = "fairlane_token"
"""The cookie of a browser that is signed in. Browsers do not tell the ports of a host apart, so the port of the service
follows in its name."""
GUESS_SECONDS = 1.0
"""Least seconds between two reads of the tokens because an unknown one was used to sign in."""


class Scope(StrEnum):
    """What a token may do. `admin` includes the others, and `operate` includes `read`."""

    PUBLIC = "public"
    """For operations only: no token is required."""
    READ = "read"
    ENQUEUE = "enqueue"
    OPERATE = "operate"
    ADMIN = "admin"


ReadTokens = Callable[[], Awaitable[Sequence[AccessToken]]]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request: a token, or this machine while no token exists."""

    id: str
    token: AccessToken | None = None
    everything: bool = False
    """Whether it may do everything without a token."""

    @property
    def bound(self) -> bool:
        """Whether it may see only a part of the store."""
        token = self.token
        return token is not None and (token.queues is not None or token.lane_prefix is not None)

    @property
    def lane_prefix(self) -> str | None:
        """The prefix of its lanes; None if it is not bound to lanes."""
        return None if self.token is None else self.token.lane_prefix

    def may(self, scope: Scope) -> bool:
        """Whether it has a scope."""
        if scope is Scope.PUBLIC or self.everything:
            return True
        return self.token is not None and self.token.allows(tokens.Scope(scope.value))

    def covers_queue(self, queue: str) -> bool:
        """Whether it may use a queue or lanes of it."""
        return self.token is None or self.token.covers_queue(queue)

    def covers(self, queue: str, lane: str | None) -> bool:
        """Whether it may use a lane of a queue."""
        return self.token is None or (self.token.covers_queue(queue) and self.token.covers_lane(lane))

    def sees(self, job: Job) -> bool:
        """Whether it may see a job."""
        return self.covers(job.queue, job.lane)

    def check_new(self, job: NewJob) -> None:
        """Reject a job for a queue or lane outside its bounds."""
        self.check(job.queue, job.lane)

    def check(self, queue: str, lane: str | None) -> None:
        """Reject a queue or lane outside its bounds."""
        if not self.covers_queue(queue):
            raise Problem(403, "this token is bound to other queues", field="queue")
        if not self.covers(queue, lane):
            kind = "lane" if self.token is not None and self.token.one_lane else "lanes that begin with"
            raise Problem(403, f"this token is bound to {kind} {self.lane_prefix!r}", field="lane")

    def check_queue(self, queue: str) -> None:
        """Reject a whole queue outside its bounds."""
        if self.lane_prefix is not None:
            raise Problem(403, "this token is bound to lanes, not to a whole queue; name a lane", field="lane")
        self.check(queue, None)


LOCAL = Caller(id="local", everything=True)
ANONYMOUS = Caller(id="anonymous")


class Access:
    """Finds the caller of a request."""

    def __init__(self, settings: HttpSettings, read: ReadTokens) -> None:
        self._settings = settings
        self._read = read
        self._callers: list[tuple[bytes, Caller]] = []
        self._read_at = self._tried_at = self._guessed_at = float("-inf")
        self._required = settings.access == "tokens"
        self._reading = asyncio.Lock()

    @property
    def fresh(self) -> bool:
        """Whether the list of tokens may still be used."""
        return self._settings.access == "open" or time.monotonic() - self._read_at <= self._settings.token_seconds

    def caller(self, scope: Connection, headers: dict[bytes, bytes], needed: Scope | None) -> Caller:
        """The caller of a request. Raises a 401 or 403 problem unless it has the scope `needed`, if one is given."""
        if needed is Scope.PUBLIC:
            return ANONYMOUS
        if self._settings.access == "open":
            return LOCAL
        caller = self._sender(headers)
        if caller is None and b"authorization" not in headers and not self._required:
            return _local(scope, headers)
        if caller is None:
            raise Problem(
                401, "send a valid token as Authorization: Bearer <token>; create one with `fairlane tokens new`"
            )
        if needed is not None and not caller.may(needed):
            raise Problem(403, f"this token does not have the scope {needed.value!r}")
        return caller

    async def has_tokens(self) -> bool:
        """Whether the store has a token."""
        await self.refresh()
        return bool(self._callers)

    async def holds(self, caller: Caller) -> bool:
        """Whether the caller's token is still valid, or still none is required. During an outage of the store the last
        known list decides."""
        if not self.fresh and time.monotonic() - self._tried_at > self._settings.token_seconds:
            try:
                async with asyncio.timeout(self._settings.store_seconds):
                    await self.refresh()
            except (FairlaneError, TimeoutError):
                self._tried_at = time.monotonic()  # not again for each of many streams
        if caller.token is None:
            return self._settings.access == "open" or not self._required
        return any(known.id == caller.id for _, known in self._callers)

    def _sender(self, headers: dict[bytes, bytes]) -> Caller | None:
        """The token of a request: of its Authorization header, else of the cookie of a browser that is signed in."""
        sent = headers.get(b"authorization")
        if sent is not None:
            kind, _, secret = sent.partition(b" ")
            return self.known(secret.strip().decode("latin-1")) if kind.lower() == b"bearer" else None
        secret_of_cookie = self.cookie(headers)
        return None if secret_of_cookie is None else self.known(secret_of_cookie)

    def cookie(self, headers: dict[bytes, bytes]) -> str | None:
        """The token in the cookie of a request that a page of this service sent; None if there is none."""
        name = cookie_name(headers).encode()
        for part in headers.get(b"cookie", b"").split(b";"):
            sent, _, value = part.strip().partition(b"=")
            # The first of a name is that of the longest path: of this service, below another one.
            if sent == name and value:
                return value.decode("latin-1") if own_origin(headers) else None
        return None

    async def signing_in(self, secret: str) -> Caller | None:
        """The caller with a token that may be new. Any client may try, so wrong ones cost at most a read a second."""
        if not self.fresh:
            await self.refresh()
        found = self.known(secret)
        if found is None and time.monotonic() - self._guessed_at >= GUESS_SECONDS:
            self._guessed_at = time.monotonic()
            await self.refresh()
            found = self.known(secret)
        return found

    def known(self, secret: str) -> Caller | None:
        """The caller with this token; None if it is unknown, revoked or expired."""
        if not secret:
            return None
        digest = tokens.digest_of(secret)
        match: Caller | None = None
        # Compare with every digest, so that the time reveals nothing about a match.
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                match = caller
        return match

    async def refresh(self) -> None:
        """Read the tokens from the store."""
        began = time.monotonic()
        async with self._reading:
            if self._read_at >= began:
                return
            found = await self._read()
            self._callers = [
                (each.digest, Caller(id=each.id, token=each)) for each in found if each.is_valid(time.time())
            ]
            # Once required, tokens stay required: revoking the last one must not open the service.
            self._required = self._required or bool(found)
            self._read_at = time.monotonic()


def _local(scope: Connection, headers: dict[bytes, bytes]) -> Caller:
    """The local caller. Raises a 401 problem if the request may come from another machine."""
    peer = scope.get("client")
    local = peer is None or peer[0] in ("127.0.0.1", "::1", "testclient")
    if not local or not FORWARDING.isdisjoint(headers) or host_name(headers) not in LOCAL_NAMES:
        raise Problem(401, "a token is required from other machines; create one with `fairlane tokens new`")
    return LOCAL


def host_name(headers: dict[bytes, bytes]) -> str:
    """The Host header without its port."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def cookie_name(headers: dict[bytes, bytes]) -> str:
    """The name of the cookie of the service that a browser called."""
    port = headers.get(b"host", b"").decode("latin-1").rpartition("]")[2].partition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdigit() else COOKIE


def check_host(settings: HttpSettings, headers: dict[bytes, bytes]) -> None:
    """Reject an unknown Host header: a foreign page may have pointed its own name at this machine (DNS rebinding)."""
    if settings.hosts is not None and host_name(headers) not in settings.hosts:
        raise Problem(421, "this host name is not allowed; add it to hosts=", field="Host")


def own_origin(headers: dict[bytes, bytes]) -> bool:
    """Whether a request comes from a page of this service, or from no page at all.

    A cookie is sent without the knowledge of who makes a browser send it. Pages of `origins` may call with a token of
    their own, not with the cookie of a visitor.
    """
    origin = headers.get(b"origin")
    if origin is None:
        return headers.get(b"sec-fetch-site", b"same-origin") in (b"same-origin", b"none")
    return origin.decode("latin-1").lower().partition("://")[2].encode() == headers.get(b"host", b"").lower()


def check_origin(settings: HttpSettings, headers: dict[bytes, bytes], *, changes: bool = False) -> None:
    """Reject requests that a page of another site makes a browser send. Links to what changes nothing may be followed:
    the other site does not see where they lead."""
    origin = headers.get(b"origin")
    if origin is None:
        foreign = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
        if foreign and (changes or headers.get(b"sec-fetch-mode") != b"navigate"):
            raise Problem(403, "pages of other sites may not call this service; add them to origins=", field="Origin")
        return
    if not own_origin(headers) and origin.decode("latin-1").lower() not in settings.origins:
        raise Problem(403, "pages of this origin may not call this service; add it to origins=", field="Origin")
