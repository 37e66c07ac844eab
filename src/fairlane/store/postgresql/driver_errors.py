"""Translates driver errors into Fairlane's errors, with advice and without data of users.

The functions of this store raise errors with SQLSTATEs of their own (``FL001`` …); all others come from PostgreSQL,
the driver or the network. No message quotes more than the server's first line, because the details can contain rows.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from ...errors import (
    Busy,
    Conflict,
    FairlaneError,
    IndexTaken,
    InvalidInput,
    NotFound,
    QueueFull,
    SchemaMismatch,
    SessionLost,
    Stale,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    TermLost,
)
from .address import Address, driver

asyncpg = driver()


class FullQueue(QueueFull):
    """A queue or lane is full; `where` names it (queue, class, lane, limit), to estimate when there will be room."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where: dict[str, Any] = msgspec.json.decode(where)


COLLISIONS = ("40001", "40P01")
"""Serialization failure and deadlock: the call had no effect and may be repeated at once."""
OWN_ERRORS: dict[str, Callable[[str, str | None], FairlaneError]] = {
    "FL001": lambda message, _: NotFound(message),
    "FL002": lambda message, _: Conflict(message),
    "FL003": lambda message, detail: FullQueue(message, detail or "{}"),
    "FL004": lambda message, detail: IndexTaken(message, float(detail) if detail else 0.0),
    "FL005": lambda message, _: Stale(message),
    "FL006": lambda message, _: SessionLost(message),
    "FL007": lambda message, _: TermLost(message),
    "FL008": lambda message, detail: InvalidInput(detail or "argument", message),
    "FL009": lambda message, _: Busy(message),
}
_GONE = re.compile(r"08|57P|25P0|40003$|57014$|53|58")
"""Broken or closed connections, servers that start, stop or lack resources, and cancelled statements."""
_MISSING = ("42P01", "42883", "42703", "42704", "3F000")
_NOT_SENT = "cannot switch to state"
"""The beginning of the driver's error for a call on a connection whose end the server has announced."""
_MOMENTARY = "Repeating the call is safe."


def is_closed(connection: Any) -> bool:
    """Whether a connection is closed. The pool releases one that breaks; its methods then raise an `InterfaceError`."""
    try:
        return bool(connection.is_closed())
    except asyncpg.InterfaceError:
        return True


def did_nothing(exc: Exception) -> bool:
    """Whether a call that failed with this error had no effect and may be repeated at once: it collided, a migration
    changed what it calls after it was prepared, or it was not sent."""
    if isinstance(exc, asyncpg.InternalClientError):
        return str(exc).startswith(_NOT_SENT)
    return getattr(exc, "sqlstate", None) in COLLISIONS or isinstance(exc, asyncpg.InvalidCachedStatementError)


def is_ours(exc: BaseException) -> bool:
    """Whether an error comes from the driver or the network, provided that the code only used its connection."""
    theirs = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
    return isinstance(exc, (*theirs, TimeoutError, ConnectionError))


def fail(exc: Exception, address: Address, connection: Any = None) -> NoReturn:
    """Raise Fairlane's error for one that a call raised. That one is its cause if it is useful and has no data."""
    error = translate(exc, address, connection)
    if connection is not None and getattr(exc, "sqlstate", "") == "25006" and not is_closed(connection):
        # Read-only: close it, so that the next call opens another connection, possibly to the new primary.
        connection.terminate()
    if isinstance(error, StoreError) and getattr(exc, "sqlstate", "")[:2] != "22":
        raise error from exc
    raise error from None


def translate(exc: Exception, address: Address, connection: Any = None) -> FairlaneError:
    """Fairlane's error for one that a call on a connection raised."""
    if isinstance(exc, FairlaneError):
        return exc
    if isinstance(exc, asyncpg.PostgresError):
        return _of_the_server(exc, address, connection)
    if isinstance(exc, TimeoutError):
        return StoreUnavailable(f"{address} did not answer in time. {_MOMENTARY}")
    if isinstance(exc, OSError):
        return StoreUnavailable(f"the connection to {address} broke ({_first_line(exc)}). {_MOMENTARY}")
    if isinstance(exc, asyncpg.OutdatedSchemaCacheError):
        return StoreUnavailable(f"the schema in {address} was changed just now. {_MOMENTARY}")
    if connection is not None and is_closed(connection):
        return StoreUnavailable(f"the connection to {address} was closed ({_first_line(exc)}). {_MOMENTARY}")
    return StoreError(f"{address}: {_first_line(exc)}")


def _of_the_server(exc: Any, address: Address, connection: Any) -> FairlaneError:
    code, message = exc.sqlstate or "", _first_line(exc)
    own = OWN_ERRORS.get(code)
    if own is not None:
        return own(exc.args[0], exc.detail)
    # The errors below may be shown together with their cause, whose detail can contain rows.
    exc.detail = None
    if code.startswith("22"):
        # The message repeats the value, which may be a payload.
        argument = re.search(r"argument (\$\d+)", message)
        return StoreError(f"{address}: {argument[0] if argument else 'a value'} does not fit (SQLSTATE {code})")
    if code == "53100":
        return StoreFull(f"the disk of {address} is full ({message}). Nothing was stored.")
    if code == "25006":
        if _is_standby(connection):
            return StoreUnavailable(f"{address} is a standby just now; it can be written when it has been promoted")
        return StoreReadOnly(f"{address} may not be written ({message}). Is default_transaction_read_only on?")
    if code == "42501":
        return StoreError(
            f"{address}: {message}. The owner of the schema {address.schema} must grant it; docs/postgresql.md "
            "has the statements for each role."
        )
    if code in _MISSING:
        return SchemaMismatch(
            f"the schema {address.schema} in {address} lacks something ({message}). "
            "Run `fairlane migrate` as its owner, or upgrade Fairlane in this process."
        )
    if code in ("26000", "42P05"):
        return StoreError(
            f"{address} loses statements between calls ({message}). Behind PgBouncer add listen=off to the URL."
        )
    if code == "55P03":
        return Busy(f"another open transaction holds a lock that this call needs ({message}). Try again.")
    if code in COLLISIONS:
        return StoreUnavailable(f"calls kept colliding in {address} ({message}). {_MOMENTARY}")
    if code == "53300":
        return StoreUnavailable(
            f"{address} has no connection left ({message}). Lower the option pool=… in the URL of your processes, "
            "raise max_connections, or put PgBouncer in between."
        )
    if _GONE.match(code):
        return StoreUnavailable(f"{address} cannot answer just now ({message}). {_MOMENTARY}")
    return StoreError(f"{address}: {message} (SQLSTATE {code})")


def translate_connecting(exc: Exception, address: Address) -> FairlaneError:
    """Fairlane's error for one that occurred while connecting."""
    if isinstance(exc, asyncpg.PostgresError):
        return _of_the_door(exc, address)
    if isinstance(exc, TimeoutError):
        return StoreUnavailable(
            f"{address} did not answer within {address.connect_seconds:g} s. Check host, port and firewall."
        )
    if isinstance(exc, ssl.SSLError):
        return StoreError(
            f"{address} cannot be trusted ({_first_line(exc)}). Check sslmode and sslrootcert in the URL."
        )
    if isinstance(exc, OSError):
        return StoreUnavailable(
            f"{address} cannot be reached ({_first_line(exc)}). Is the server running, and are host and port right?"
        )
    if isinstance(exc, asyncpg.TargetServerAttributeNotMatched):
        return StoreUnavailable(f"none of the hosts of {address} is the primary just now")
    if isinstance(exc, ValueError):
        # The message may repeat a part of the URL, which may be part of the password.
        return InvalidInput("url", f"{address} is not one that the driver can use; check its options")
    return StoreError(f"{address}: {_first_line(exc)}")


def _of_the_door(exc: Any, address: Address) -> FairlaneError:
    code, message = exc.sqlstate or "", _first_line(exc)
    if code.startswith("28"):
        return StoreError(f"{address} rejected this user ({message}). Check user and password.")
    if code == "3D000":
        return StoreError(f"{address}: {message}. Make it with CREATE DATABASE, or correct the URL.")
    if code in ("42704", "22023") or (code == "08P01" and "parameter" in message):
        return InvalidInput("url", f"the server does not know an option of {address} ({message})")
    return _of_the_server(exc, address, None)


def _is_standby(connection: Any) -> bool:
    if connection is None or is_closed(connection):
        return False
    return getattr(connection.get_settings(), "in_hot_standby", "off") == "on"


def _first_line(exc: BaseException) -> str:
    said = str(exc.args[0]) if isinstance(exc, asyncpg.PostgresError) and exc.args else str(exc)
    return said.strip().partition("\n")[0] or type(exc).__name__
