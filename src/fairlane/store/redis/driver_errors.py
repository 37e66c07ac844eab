"""What the server's refusals and the driver's errors mean: each becomes one of ours, with advice and without data.

A refusal is an error that the server answers with. Most come before a command has done anything, and those are told
apart (`did_nothing`). One from inside a function or script does not: what ran before it has happened.
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
    "BUSY": "is busy with a script that runs long",
    "MASTERDOWN": "has lost its master",
    "READONLY": "is a replica just now, and may not be written",
    "CLUSTERDOWN": "is a node of a cluster that is down",
    "TRYAGAIN": "is a node of a cluster that is moving keys",
    "NOREPLICAS": "has too few replicas to be written",
    "MISCONF": "cannot write to its disk, and takes no more until it can",
    "UNBLOCKED": "has ended a call that waited, because its role has changed",
}
"""What passes by itself or by the hand of an operator. Such a command was refused before it did anything."""
_MOMENTARY = "Repeating the call is safe."
_INSIDE = re.compile(r"\bon @user_(?:function|script)")
_INSIDE_DENIED = re.compile(r"ACL failure in script|The user executing the script can't")
"""How Valkey, and before it Redis 7.0, say what is `NOPERM` elsewhere."""
_LONGEST = 300


class Refusal(ResponseError):
    """An error that the server has answered with; `code` is its first word, in capitals."""

    def __init__(self, text: str) -> None:
        # The server repeats the arguments of a command that it does not know, and they may be anybody's payload.
        self.said = text.partition("\n")[0].partition(", with args beginning with")[0].strip()[:_LONGEST]
        super().__init__(self.said)
        word = self.said.partition(" ")[0]
        self.code = word if word.isupper() else "ERR"
        self.from_inside = _INSIDE.search(text) is not None
        """Whether a function or script has come across it, after it may have changed something."""


class ServerError(StoreError):
    """The server has refused a command, in words that mean nothing special here.

    `code` is the first of them, such as ``ERR`` or ``WRONGTYPE``; `said` is all of them.
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
    """Whether it is known that a call that failed so has changed nothing. Also takes the error that we made of it."""
    cause = exc.__cause__ if isinstance(exc, StoreError) else exc
    return isinstance(cause, Refusal) and not cause.from_inside and (cause.code in _BEFORE or cause.code == "OOM")


def fail(exc: Exception, address: Address, command: object) -> NoReturn:
    """Raise our error for one that a command has raised."""
    raise translate(exc, address, command.decode() if isinstance(command, bytes) else str(command)) from exc


def translate(exc: Exception, address: Address, command: str) -> FairlaneError:
    """Our error for one that a command has raised."""
    if isinstance(exc, FairlaneError):
        return exc
    if isinstance(exc, Refusal):
        return _of_the_server(exc, address, command)
    if isinstance(exc, TimeoutError):
        return StoreUnavailable(f"{address} did not answer in time. {_MOMENTARY}")
    if isinstance(exc, OSError | EOFError | RedisError):
        return StoreUnavailable(f"the connection to {address} broke ({_first_line(exc)}). {_MOMENTARY}")
    return StoreError(f"{address}: {_first_line(exc)}")


def _of_the_server(exc: Refusal, address: Address, command: str) -> FairlaneError:
    code, said = exc.code, exc.said
    if code in _BEFORE:
        return StoreUnavailable(f"{address} {_BEFORE[code]} ({said}). {_MOMENTARY}")
    if code == "OOM":
        told = f"the memory of {address} is full ({said}). Raise maxmemory, or let fewer finished jobs be kept."
        return StoreError(told) if exc.from_inside else StoreFull(f"{told} Nothing was stored.")
    if code in ("NOAUTH", "WRONGPASS") or said.startswith("ERR AUTH"):
        return StoreError(f"{address} does not let this user in ({said}). Check user and password in the URL.")
    if code == "NOPERM" and not exc.from_inside:
        return NotAllowed(f"{address} does not allow the command {command} ({said}). Let ACL SETUSER grant it.")
    if exc.from_inside and (code == "NOPERM" or _INSIDE_DENIED.search(said)):
        return StoreError(
            f"{address} does not allow this user what its functions do ({said}). Let ACL SETUSER grant the whole role."
        )
    if code in ("MOVED", "ASK"):
        return StoreError(
            f"{address} is a node of a cluster that does not have this namespace ({said}). All keys of a namespace are "
            "on one node: name that one in the URL."
        )
    if "unknown command" in said:
        told = f"{address} has no command {command} ({said}). Fairlane needs Redis 7.0 or Valkey 7.2, or newer."
        return ServerError(told, code, said)
    return ServerError(f"{address}: {said}", code, said)


def translate_connecting(exc: Exception, address: Address) -> FairlaneError:
    """Our error for one that kept us from connecting."""
    if isinstance(exc, FairlaneError):
        return exc
    if isinstance(exc, Refusal):
        return _of_the_door(exc, address)
    if isinstance(exc, TimeoutError):
        return StoreUnavailable(
            f"{address} did not answer within {address.connect_seconds:g} s. Are host and port right, and does a "
            "firewall let us through?"
        )
    # The driver makes one kind of error of all that the network and the encryption can say.
    below = exc.__context__ if isinstance(exc, RedisError) and exc.__context__ is not None else exc
    if isinstance(below, ssl.SSLError) and not isinstance(below, ssl.SSLEOFError):
        return StoreError(
            f"{address} cannot be trusted ({_first_line(below)}). Does it speak TLS, and are ca=…, cert=… and key=… in "
            "the URL right?"
        )
    if isinstance(below, UnicodeError):
        return InvalidInput("url", "host: is not the name or the number of a host")
    if isinstance(below, ConnectionResetError | BrokenPipeError | RedisConnectionError):
        # It was there. What it said before may be lost.
        return StoreUnavailable(
            f"{address} hung up at once ({_first_line(below)}). Does it stop just now, or has it as many connections "
            "as maxclients allows? Then lower the option pool=… in the URL of your processes."
        )
    if isinstance(exc, OSError | EOFError | RedisError):
        return StoreUnavailable(
            f"{address} cannot be reached ({_first_line(below)}). Is the server running, and are host and port right?"
        )
    return StoreError(f"{address}: {_first_line(exc)}")


def _of_the_door(exc: Refusal, address: Address) -> FairlaneError:
    if "DB index" in exc.said or "SELECT is not allowed" in exc.said:
        return StoreError(
            f"{address} has no database {address.db} ({exc.said}). Name another one, or none and a namespace=…"
        )
    if "max number of clients" in exc.said:
        return StoreUnavailable(
            f"{address} has no connection left ({exc.said}). Lower the option pool=… in the URL of your processes, or "
            "raise maxclients."
        )
    return _of_the_server(exc, address, "CLIENT SETNAME")


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().partition("\n")[0][:_LONGEST] or type(exc).__name__
