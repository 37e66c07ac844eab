"""Translates error replies and driver errors into Fairlane's errors, with advice and without data.

A refusal is an error reply of the server. Most are sent before a command has done anything, and `did_nothing`
recognises those. One from inside a function or script may come after other commands have taken effect.
"""

from __future__ import annotations

import re
import ssl
from typing import NoReturn

from ...errors import FairlaneError, InvalidInput, StoreError, StoreFull, StoreUnavailable
from .address import Address
from .driver import RedisConnectionError, RedisError, ResponseError

_BEFORE = {
    "LOADING": "is loading its data",
    "BUSY": "is busy with a long-running script",
    "MASTERDOWN": "has lost its master",
    "READONLY": "is a replica at the moment and read-only",
    "CLUSTERDOWN": "is a node of a cluster that is down",
    "TRYAGAIN": "is a node of a cluster that is moving keys",
    "NOREPLICAS": "has too few replicas to accept writes",
    "MISCONF": "cannot write to its disk and rejects writes until it can",
    "UNBLOCKED": "has ended a blocked call because its role changed",
}
"""Temporary conditions, or ones that an operator ends. The command was rejected before it did anything."""
_MOMENTARY = "Repeating the call is safe."
_INSIDE = re.compile(r"\bon @user_(?:function|script)")
_INSIDE_DENIED = re.compile(r"ACL failure in script|The user executing the script can't")
"""How Valkey and Redis 7.0 word what is `NOPERM` elsewhere."""
_LONGEST = 300


class Refusal(ResponseError):
    """An error reply; `code` is its first word, in capitals."""

    def __init__(self, text: str) -> None:
        # The server repeats the arguments of an unknown command, and they may contain a payload.
        self.said = text.partition("\n")[0].partition(", with args beginning with")[0].strip()[:_LONGEST]
        super().__init__(self.said)
        word = self.said.partition(" ")[0]
        self.code = word if word.isupper() else "ERR"
        self.from_inside = _INSIDE.search(text) is not None
        """Whether it was raised inside a function or script, which may have changed something before."""


class ServerError(StoreError):
    """An error reply that has no special meaning here.

    `code` is its first word, such as ``ERR`` or ``WRONGTYPE``; `said` is the whole text.
    """

    def __init__(self, message: str, code: str, said: str) -> None:
        super().__init__(message)
        self.code = code
        self.said = said

    def __reduce__(self) -> tuple[type[ServerError], tuple[str, str, str]]:
        return (type(self), (str(self), self.code, self.said))


class NotAllowed(StoreError):
    """The server does not allow this user a command, or a key or channel of it."""


def did_nothing(exc: BaseException) -> bool:
    """Whether a call that failed with this error has changed nothing for certain. Also takes the translated error."""
    cause = exc.__cause__ if isinstance(exc, StoreError) else exc
    return isinstance(cause, Refusal) and not cause.from_inside and (cause.code in _BEFORE or cause.code == "OOM")


def fail(exc: Exception, address: Address, command: object) -> NoReturn:
    """Raise Fairlane's error for one that a command raised."""
    raise translate(exc, address, command.decode() if isinstance(command, bytes) else str(command)) from exc


def translate(exc: Exception, address: Address, command: str) -> FairlaneError:
    """Fairlane's error for one that a command raised."""
    if isinstance(exc, FairlaneError):
        return exc
    if isinstance(exc, Refusal):
        return _of_refusal(exc, address, command)
    if isinstance(exc, TimeoutError):
        return StoreUnavailable(f"{address} did not answer in time. {_MOMENTARY}")
    if isinstance(exc, OSError | EOFError | RedisError):
        return StoreUnavailable(f"the connection to {address} broke ({_first_line(exc)}). {_MOMENTARY}")
    return StoreError(f"{address}: {_first_line(exc)}")


def _of_refusal(exc: Refusal, address: Address, command: str) -> FairlaneError:
    code, said = exc.code, exc.said
    if code in _BEFORE:
        return StoreUnavailable(f"{address} {_BEFORE[code]} ({said}). {_MOMENTARY}")
    if code == "OOM":
        message = f"the memory of {address} is full ({said}). Raise maxmemory, or keep fewer finished jobs."
        return StoreError(message) if exc.from_inside else StoreFull(f"{message} Nothing was stored.")
    if code in ("NOAUTH", "WRONGPASS") or said.startswith("ERR AUTH"):
        return StoreError(f"{address} rejects this user ({said}). Check user and password in the URL.")
    if code == "NOPERM" and not exc.from_inside:
        return NotAllowed(f"{address} does not allow the command {command} ({said}). Grant it with ACL SETUSER.")
    if exc.from_inside and (code == "NOPERM" or _INSIDE_DENIED.search(said)):
        return StoreError(
            f"{address} denies this user commands that the functions use ({said}). "
            "Grant the whole role with ACL SETUSER."
        )
    if code in ("MOVED", "ASK"):
        return StoreError(
            f"{address} is a node of a cluster that does not have this namespace ({said}). All keys of a namespace are "
            "on one node: name that one in the URL."
        )
    if "unknown command" in said:
        message = f"{address} has no command {command} ({said}). Fairlane needs Redis 7.0 or Valkey 7.2, or newer."
        return ServerError(message, code, said)
    return ServerError(f"{address}: {said}", code, said)


def translate_connecting(exc: Exception, address: Address) -> FairlaneError:
    """Fairlane's error for one that occurred while connecting."""
    if isinstance(exc, FairlaneError):
        return exc
    if isinstance(exc, Refusal):
        return _of_refused_connection(exc, address)
    if isinstance(exc, TimeoutError):
        return StoreUnavailable(
            f"{address} did not answer within {address.connect_seconds:g} s. Are host and port right, and does a "
            "firewall block the connection?"
        )
    # The driver wraps all network and TLS errors in one type.
    below = exc.__context__ if isinstance(exc, RedisError) and exc.__context__ is not None else exc
    if isinstance(below, ssl.SSLError) and not isinstance(below, ssl.SSLEOFError):
        return StoreError(
            f"{address}: the TLS handshake failed ({_first_line(below)}). Does the server use TLS, and are ca=…, "
            "cert=… and key=… in the URL right?"
        )
    if isinstance(below, UnicodeError):
        return InvalidInput("url", "host: is not a host name or an IP address")
    if isinstance(below, ConnectionResetError | BrokenPipeError | RedisConnectionError):
        # The server was reached, but its last message may be lost.
        return StoreUnavailable(
            f"{address} closed the connection at once ({_first_line(below)}). It may be stopping, or have reached "
            "maxclients; in that case lower pool=… in the URLs of your processes."
        )
    if isinstance(exc, OSError | EOFError | RedisError):
        return StoreUnavailable(
            f"{address} cannot be reached ({_first_line(below)}). Is the server running, and are host and port right?"
        )
    return StoreError(f"{address}: {_first_line(exc)}")


def _of_refused_connection(exc: Refusal, address: Address) -> FairlaneError:
    if "DB index" in exc.said or "SELECT is not allowed" in exc.said:
        return StoreError(
            f"{address} has no database {address.db} ({exc.said}). Use another one, or database 0 with a namespace=…"
        )
    if "max number of clients" in exc.said:
        return StoreUnavailable(
            f"{address} has no connection left ({exc.said}). Lower pool=… in the URLs of your processes, or "
            "raise maxclients."
        )
    return _of_refusal(exc, address, "CLIENT SETNAME")


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().partition("\n")[0][:_LONGEST] or type(exc).__name__
