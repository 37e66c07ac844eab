"""Arguments and results as JSON, decoded into the annotated types before a body sees them. No pickle, ever.

What JSON cannot hold is refused when it is sent, with an error that names the argument: a value that changes
on the way (NaN becoming null) would be a wrong answer much later, on another machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ..errors import InvalidInput
from . import names

T = TypeVar("T")


def _encode_other(value: Any) -> Any:
    """Pydantic models, by their one well-known method; anything else is not for JSON."""
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _decode_other(type_: type[Any], value: Any) -> Any:
    """The other way round, into a Pydantic model."""
    validate = getattr(type_, "model_validate", None)
    if not callable(validate):
        raise TypeError(f"{type_.__name__} cannot be read from JSON")
    try:
        return validate(value)
    except ValueError as exc:
        raise ValueError(_problems(exc)) from None


def _problems(exc: ValueError) -> str:
    """What is wrong with a model's fields, without the input, which Pydantic's own text repeats."""
    errors = getattr(exc, "errors", None)
    if not callable(errors):
        return str(exc)
    return "; ".join(": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"]))) for one in errors())


_encoder = msgspec.json.Encoder(enc_hook=_encode_other)


def encode(field: str, value: Any, most: int = names.PAYLOAD_BYTES) -> bytes:
    """`value` as JSON of at most `most` bytes; `field` is what an error calls it."""
    try:
        raw = _encoder.encode(value)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidInput(field, str(exc)) from None
    except RecursionError:
        raise InvalidInput(field, "is nested too deeply, or contains itself") from None
    # What msgspec makes of NaN and infinity, as a value and as a key; without one there is none to look for.
    if (b"null" in raw or b'inf"' in raw or b'"nan"' in raw) and _has_nonfinite(value):
        raise InvalidInput(field, "contains NaN or infinity, which JSON cannot hold")
    return names.check_size(field, raw, most)


def encode_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """A call's arguments as the payload ``[args, kwargs]``; an error names the argument at fault."""
    try:
        return encode("payload", (args, kwargs))
    except InvalidInput as whole:
        for position, value in enumerate(args):
            encode(f"argument {position + 1}", value)
        for name, value in kwargs.items():
            encode(f"argument {name!r}", value)
        raise whole from None


def decode_call(payload: bytes) -> tuple[list[msgspec.Raw], dict[str, msgspec.Raw]]:
    """The arguments of a payload, each still undecoded, so that an error can name the one at fault."""
    try:
        return _call_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidInput("payload", f"is not [args, kwargs] ({exc})") from None


_call_decoder = msgspec.json.Decoder(tuple[list[msgspec.Raw], dict[str, msgspec.Raw]])


_VALUE = re.compile(r"Invalid enum value .*?(?= - at |$)", re.DOTALL)
"""The one message that repeats what was sent. Nothing that was sent is ever shown."""


def hide_values(message: str) -> str:
    """A message of the decoder without what was sent."""
    return _VALUE.sub("Invalid enum value", message)


class Reader(Generic[T]):
    """Reads values of one type, again and again: looking the type up is most of the work, and is done once."""

    __slots__ = ("_decoder", "_field")

    def __init__(self, field: str, type_: type[T]) -> None:
        self._field = field
        self._decoder = msgspec.json.Decoder(type_, strict=True, dec_hook=_decode_other)

    def read(self, raw: bytes | msgspec.Raw) -> T:
        """`raw` as a value of the type; refused, naming the field, when it is not one."""
        try:
            return self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise InvalidInput(self._field, hide_values(str(exc))) from None
        except Exception as exc:
            # What a class does in its own constructor can raise anything; its words may repeat the value.
            raise InvalidInput(self._field, f"{type(exc).__name__} while it was read") from None


def decode(field: str, raw: bytes | msgspec.Raw, type_: type[T]) -> T:
    """`raw` as a value of `type_`; refused, naming the field, when it is not one."""
    return Reader(field, type_).read(raw)


def _has_nonfinite(value: Any) -> bool:
    # A list of what is left instead of recursion: the encoder goes deeper than Python calls may.
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return True
        elif isinstance(item, Mapping):
            left += item.keys()
            left += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            left += item
        elif item is not None and not isinstance(item, str | bytes | int):
            plain = msgspec.to_builtins(item, enc_hook=_encode_other)
            if plain is not item:
                left.append(plain)
    return False
