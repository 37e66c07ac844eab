"""Access tokens of the HTTP service: how secrets are generated and compared, and what a token allows.

A secret is ``fl_ID_RANDOM``. It is shown once, when it is created; stores keep only its SHA-256 digest. The random part
has 256 bits, so a digest without salt or stretching cannot be brute-forced.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from ..errors import InvalidInput
from . import names

PREFIX = "fl_"
SECRET_BYTES = 32
ID_BYTES = 6
DIGEST_BYTES = 32
HINT_LENGTH = 4
MOST_QUEUES = 100
SHORTEST_LIFE = 1.0


class Scope(StrEnum):
    """What a token permits."""

    READ = "read"
    """Read jobs, queues, lanes, workers and events."""
    ENQUEUE = "enqueue"
    """Send jobs."""
    OPERATE = "operate"
    """Cancel, retry, pause, resume, override, release; includes `read`."""
    ADMIN = "admin"
    """Everything, including tokens."""

    @property
    def included(self) -> frozenset[Scope]:
        """The scopes it includes, itself among them."""
        return _INCLUDED[self]


_INCLUDED = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.ENQUEUE: frozenset({Scope.ENQUEUE}),
    Scope.OPERATE: frozenset({Scope.OPERATE, Scope.READ}),
    Scope.ADMIN: frozenset(Scope),
}


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token to store. Only its owner has the secret."""

    id: str
    name: str
    digest: bytes
    scopes: tuple[Scope, ...]
    queues: tuple[str, ...] | None = None
    """The queues it is restricted to; None for all."""
    lane_prefix: str | None = None
    """The lanes it is restricted to, see `covers_lane`; None for all."""
    expires: float | None = None
    """For how many seconds it is valid; None for no expiry."""
    hint: str = ""
    """The last characters of the secret, so that people can recognise it."""

    def __post_init__(self) -> None:
        names.check_name("id", self.id)
        if "_" in self.id:
            raise InvalidInput("id", "must not contain '_', which separates the parts of a secret")
        names.check_key("name", self.name)
        names.check_size("digest", self.digest, DIGEST_BYTES)
        if len(self.digest) != DIGEST_BYTES:
            raise InvalidInput("digest", f"must be the {DIGEST_BYTES} bytes of a SHA-256 digest")
        if not self.scopes:
            raise InvalidInput("scopes", f"give at least one of {', '.join(Scope)}")
        if self.queues is not None:
            if not self.queues:
                raise InvalidInput("queues", "an empty list allows nothing; leave it out for all queues")
            if len(self.queues) > MOST_QUEUES:
                raise InvalidInput("queues", f"at most {MOST_QUEUES}, not {len(self.queues)}")
            for queue in self.queues:
                names.check_name("queues", queue)
        if self.lane_prefix is not None:
            names.check_key("lane_prefix", self.lane_prefix)
            if self.lane_prefix.endswith("*"):
                raise InvalidInput("lane_prefix", f"write {self.lane_prefix.rstrip('*')!r}, without the '*'")
        if Scope.ADMIN in self.scopes and not (self.queues is None and self.lane_prefix is None):
            raise InvalidInput("scopes", "admin cannot be restricted to queues or lanes; leave them out or use operate")
        if self.expires is not None:
            names.check_seconds("expires", self.expires, least=SHORTEST_LIFE)
        if len(self.hint) > HINT_LENGTH:
            raise InvalidInput("hint", f"must not be longer than {HINT_LENGTH} characters")


class AccessToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token as it is stored."""

    id: str
    name: str
    digest: bytes
    scopes: tuple[Scope, ...]
    queues: tuple[str, ...] | None
    lane_prefix: str | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    hint: str

    def __repr__(self) -> str:
        return f"AccessToken(id={self.id!r}, name={self.name!r}, scopes={[s.value for s in self.scopes]})"

    def is_valid(self, now: float) -> bool:
        """Whether it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def matches(self, secret: str) -> bool:
        """Whether this is its secret, compared in constant time."""
        return hmac.compare_digest(self.digest, digest_of(secret))

    def allows(self, scope: Scope) -> bool:
        """Whether one of its scopes includes this one."""
        return any(scope in each.included for each in self.scopes)

    def covers_queue(self, queue: str) -> bool:
        """Whether it permits access to a queue."""
        return self.queues is None or queue in self.queues

    def covers_lane(self, lane: str | None) -> bool:
        """Whether it permits access to a lane.

        A prefix that ends in a letter or a digit (``user:ann``) covers exactly that lane, so that it does not cover
        ``user:anna``. Any other prefix (``user:``, ``acme/``) covers every lane that begins with it.
        """
        prefix = self.lane_prefix
        if prefix is None:
            return True
        if lane is None:
            return False
        return lane == prefix if self.one_lane else lane.startswith(prefix)

    @property
    def one_lane(self) -> bool:
        """Whether its prefix is the name of a lane."""
        return self.lane_prefix is not None and self.lane_prefix[-1].isalnum()


def make(
    name: str,
    scopes: Iterable[Scope | str],
    *,
    queues: Iterable[str] | None = None,
    lane_prefix: str | None = None,
    expires: float | None = None,
) -> tuple[NewToken, str]:
    """Generate a token to store, and its secret."""
    id = secrets.token_hex(ID_BYTES)
    secret = f"{PREFIX}{id}_{secrets.token_urlsafe(SECRET_BYTES)}"
    token = NewToken(
        id=id,
        name=name,
        digest=digest_of(secret),
        scopes=scopes_of(scopes),
        queues=None if queues is None else tuple(dict.fromkeys(_several("queues", queues))),
        lane_prefix=lane_prefix,
        expires=expires,
        hint=secret[-HINT_LENGTH:],
    )
    return token, secret


def scopes_of(given: Iterable[Scope | str]) -> tuple[Scope, ...]:
    """Scopes by their names, each once, in the order of `Scope`."""
    wanted = set()
    for each in _several("scopes", given):
        if each not in tuple(Scope):
            raise InvalidInput("scopes", f"unknown scope {names.shown(each)}; use {', '.join(Scope)}")
        wanted.add(Scope(each))
    return tuple(scope for scope in Scope if scope in wanted)


def digest_of(secret: str) -> bytes:
    """The digest of a secret, which is what stores keep."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def stored(new: NewToken, now: float) -> AccessToken:
    """Return the stored form of a token that is added at `now`."""
    return AccessToken(
        id=new.id,
        name=new.name,
        digest=new.digest,
        scopes=new.scopes,
        queues=new.queues,
        lane_prefix=new.lane_prefix,
        created_at=now,
        expires_at=None if new.expires is None else now + new.expires,
        revoked_at=None,
        hint=new.hint,
    )


def _several(field: str, given: Iterable[str]) -> Iterable[str]:
    if isinstance(given, str):
        raise InvalidInput(field, f"must be a list, such as [{names.shown(given)}]")
    return given
