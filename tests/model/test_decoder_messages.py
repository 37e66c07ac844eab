"""A message about a wrong value names the allowed ones, and never the value."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import pytest

from fairlane.errors import InvalidInput
from fairlane.model import codec
from fairlane.model.decoder_messages import hide_values


class Size(enum.StrEnum):
    SMALL = "s"
    LARGE = "l"


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


Many = enum.Enum("Many", {f"n{number}": f"n{number}" for number in range(30)})  # type: ignore[misc]


class Picture(msgspec.Struct):
    size: Size = Size.SMALL
    parts: list[Size | None] = []
    named: dict[str, Literal["a", "b", "c"]] = {}
    by_size: dict[Size, int] = {}


class Two(NamedTuple):
    first: int
    second: Size


@dataclass
class Frame:
    picture: Picture


EITHER = "must be 's' or 'l'"


@pytest.mark.parametrize(
    ("type_", "raw", "message"),
    [
        (Size, b'"x"', EITHER),
        (Size, b'"x - at `$.size`"', EITHER),
        (Size, b'"x\\n - at `$.size`"', EITHER),
        (Size | None, b'"x"', EITHER),
        (Number, b"3", "must be 1 or 2"),
        (Literal["only"], b'"x"', "must be 'only'"),
        (Picture, b'{"size":"x - at `$.y`"}', f"{EITHER} - at `$.size`"),
        (Picture, b'{"parts":["s","x"]}', f"{EITHER} - at `$.parts[1]`"),
        (Picture, b'{"named":{"k":"x"}}', "must be 'a', 'b' or 'c' - at `$.named[...]`"),
        (Picture, b'{"by_size":{"x":1}}', f"{EITHER} - at `key` in `$.by_size`"),
        (list[Frame], b'[{"picture":{"size":"x"}}]', f"{EITHER} - at `$[0].picture.size`"),
        (Two, b'[1,"x"]', f"{EITHER} - at `$[1]`"),
        (tuple[int, Size], b'[1,"x"]', f"{EITHER} - at `$[1]`"),
        (tuple[Size, ...], b'["x"]', f"{EITHER} - at `$[0]`"),
        (set[Size], b'["x"]', f"{EITHER} - at `$[0]`"),
        (Many, b'"x"', "must be one of " + ", ".join(f"'n{number}'" for number in range(20)) + ", …"),
        (Size, b"1", "Expected `str`, got `int`"),
    ],
)
def test_the_allowed_values_are_named(type_: Any, raw: bytes, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        codec.decode("argument 'a'", raw, type_)
    assert refused.value.problem == message


def test_without_the_type_the_value_is_only_removed() -> None:
    assert hide_values("Invalid enum value 'sk-live' - at `$.a`") == "Invalid enum value - at `$.a`"
    assert hide_values("Invalid enum value 'sk-live'", object()) == "Invalid enum value"
