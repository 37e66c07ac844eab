"""Arguments and results as JSON, decoded into the annotated types before a task function receives them. No pickle.

A value that JSON cannot represent is rejected when it is sent, with an error that names the argument: a value that
changes on the way (NaN becoming null) would cause a wrong result much later, on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ..errors import InvalidInput
from . import names
from .decoder_messages import hide_values

T = TypeVar("T")


_PLAIN: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__index__),
    (float, float.__float__),
)
"""The types whose subclasses are sent as what they derive from: Django's `SafeString` is a string."""


def _encode_other(value: Any) -> Any:
    """Encode a Pydantic model, or a subclass of a type that JSON knows; any other type is rejected."""
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    for base, plain in _PLAIN:
        if isinstance(value, base):
            return plain(value)
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


def _decode_other(type_: type[Any], value: Any) -> Any:
    """Decode into a Pydantic model; any other type is rejected."""
    validate = getattr(type_, "model_validate", None)
    if not callable(validate):
        raise TypeError(f"{type_.__name__} cannot be decoded from JSON")
    try:
        return validate(value)
    except ValueError as exc:
        raise ValueError(_problems(exc)) from None


def _problems(exc: ValueError) -> str:
    """Pydantic's errors without the input, which its own text repeats."""
    errors = getattr(exc, "errors", None)
    if not callable(errors):
        return str(exc)
    return "; ".join(": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"]))) for one in errors())


_encoder = msgspec.json.Encoder(enc_hook=_encode_other)


def encode(field: str, value: Any, most: int = names.PAYLOAD_BYTES) -> bytes:
    """Encode `value` as JSON of at most `most` bytes; errors name it as `field`."""
    try:
        raw = _encoder.encode(value)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidInput(field, str(exc)) from None
    except RecursionError:
        raise InvalidInput(field, "is nested too deeply or contains itself") from None
    # How msgspec writes NaN and infinity, as a value and as a key: without these bytes there is nothing to search for.
    if (b"null" in raw or b'inf"' in raw or b'"nan"' in raw) and _has_nonfinite(value):
        raise InvalidInput(field, "contains NaN or infinity, which JSON cannot represent")
    return names.check_size(field, raw, most)


def encode_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Encode a call's arguments as the payload ``[args, kwargs]``; an error names the invalid argument."""
    try:
        return encode("payload", (args, kwargs))
    except InvalidInput as whole:
        for position, value in enumerate(args):
            encode(f"argument {position + 1}", value)
        for name, value in kwargs.items():
            encode(f"argument {name!r}", value)
        raise whole from None


def decode_call(payload: bytes) -> tuple[list[msgspec.Raw], dict[str, msgspec.Raw]]:
    """Split a payload into its arguments, each still undecoded, so that an error can name the invalid one."""
    try:
        return _call_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidInput("payload", f"is not [args, kwargs] ({exc})") from None


_call_decoder = msgspec.json.Decoder(tuple[list[msgspec.Raw], dict[str, msgspec.Raw]])


class Reader(Generic[T]):
    """Decodes values of one type. Building the decoder is most of the work and is done once."""

    __slots__ = ("_decoder", "_field")

    def __init__(self, field: str, type_: type[T]) -> None:
        self._field = field
        self._decoder = msgspec.json.Decoder(type_, strict=True, dec_hook=_decode_other)

    def read(self, raw: bytes | msgspec.Raw) -> T:
        """Decode `raw` into the type. Raises `InvalidInput` naming the field when it does not match."""
        try:
            return self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise InvalidInput(self._field, hide_values(str(exc), self._decoder.type)) from None
        except Exception as exc:
            # A user's constructor can raise anything, and its message may repeat the value.
            raise InvalidInput(self._field, f"{type(exc).__name__} while decoding it") from None


def decode(field: str, raw: bytes | msgspec.Raw, type_: type[T]) -> T:
    """Decode `raw` into `type_`. Raises `InvalidInput` naming the field when it does not match."""
    return Reader(field, type_).read(raw)


def _has_nonfinite(value: Any) -> bool:
    # A work list instead of recursion: the encoder accepts deeper nesting than Python's call stack.
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
