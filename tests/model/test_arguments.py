"""Calls as payloads and back, for every kind of parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pytest

from fairlane.errors import InvalidInput
from fairlane.model.arguments import Arguments

if TYPE_CHECKING:
    from pathlib import Path


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: int = 0


class Pair(NamedTuple):
    left: str
    right: int


class Bag(TypedDict):
    name: str


class Order(msgspec.Struct):
    id: int
    points: list[Point]


def positional(a: int, b: str = "b", /, c: float = 1.0) -> None: ...
def named(*, a: int, b: str = "b") -> None: ...
def many(first: int, *rest: int, flag: bool = False, **more: str) -> None: ...
def later(node: Later) -> None: ...
def typed(
    when: datetime,
    day: date,
    span: timedelta,
    colour: Colour,
    point: Point,
    pair: Pair,
    bag: Bag,
    order: Order,
    id: UUID,
    price: Decimal,
    data: bytes,
    maybe: int | None,
    choice: Literal["a", "b"],
    numbers: set[int],
    nested: dict[str, list[tuple[int, str]]],
) -> Order:
    return order


def unresolved(path: Path) -> None: ...
def loose(a, b=None):  # type: ignore[no-untyped-def]  # that is the point
    ...


class Later(msgspec.Struct):
    name: str


EVERYTHING = (
    datetime(2026, 11, 15, 12, 30, tzinfo=UTC),
    date(2026, 11, 15),
    timedelta(minutes=5),
    Colour.RED,
    Point(1, 2),
    Pair("l", 3),
    {"name": "bag"},
    Order(7, [Point(0)]),
    UUID(int=5),
    Decimal("1.50"),
    b"\x00\xff",
    None,
    "b",
    {1, 2},
    {"k": [(1, "one")]},
)


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (positional, (1,), {}),
        (positional, (1, "x"), {"c": 2.5}),
        (named, (), {"a": 1, "b": "x"}),
        (many, (1, 2, 3), {"flag": True, "word": "x"}),
        (many, (1,), {}),
        (later, (Later("n"),), {}),
        (typed, EVERYTHING, {}),
        (loose, (1,), {"b": [1, {"c": None}]}),
        (loose, ({"any": "thing"}, None), {}),
    ],
)
def test_what_was_written_is_read_back_as_it_was(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    arguments = Arguments(function)
    assert arguments.read(arguments.write(args, kwargs)) == (list(args), kwargs)


def test_an_integer_is_a_float_where_one_is_wanted() -> None:
    arguments = Arguments(positional)
    [_, _, value], _ = arguments.read(arguments.write((1, "x", 5), {}))
    assert (value, type(value)) == (5.0, float)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "field"),
    [
        (positional, ("one",), {}, "argument 'a'"),
        (positional, (1, 2), {}, "argument 'b'"),
        (named, (), {"a": 1, "b": 5}, "argument 'b'"),
        (many, (1, 2, "three"), {}, "argument 'rest'"),
        (many, (1,), {"word": 5}, "argument 'more'"),
        (later, ({"name": 5},), {}, "argument 'node'"),
        (loose, (object(),), {}, "argument 1"),
        (loose, (float("nan"),), {}, "argument 1"),
    ],
)
def test_a_wrong_argument_is_named(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        Arguments(function).write(args, kwargs)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("function", "payload", "problem"),
    [
        (positional, b"[[],{}]", "missing a required argument: 'a'"),
        (positional, b'[[1,"b",1.0,2],{}]', "argument 4"),
        (positional, b'[[1],{"a":2}]', "argument 'a'"),
        (loose, b'[[1],{"a":2}]', "does not match the parameters of loose: multiple values for argument 'a'"),
        (positional, b'[[1],{"d":2}]', "argument 'd'"),
        (named, b"[[1],{}]", "argument 1"),
        (named, b"[[],{}]", "missing a required"),
        (positional, b"{}", "payload"),
        (positional, b"[[1]", "payload"),
        (positional, b"null", "payload"),
    ],
)
def test_a_payload_that_does_not_fit_is_refused(function: Callable[..., Any], payload: bytes, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        Arguments(function).read(payload)


def test_an_annotation_that_exists_only_for_type_checkers_is_reported() -> None:
    with pytest.raises(InvalidInput, match=r"an annotation of unresolved cannot be resolved .* TYPE_CHECKING"):
        Arguments(unresolved).write(("/tmp",), {})


def test_results_are_read_as_the_function_says() -> None:
    assert Arguments(typed).result.read(b'{"id":1,"points":[{"x":2}]}') == Order(1, [Point(2)])
    assert Arguments(loose).result.read(b'{"id":1}') == {"id": 1}
    with pytest.raises(InvalidInput, match="result"):
        Arguments(typed).result.read(b"5")


def test_defaults_are_filled_in_for_templates() -> None:
    assert Arguments(positional).bind((1,), {}) == {"a": 1, "b": "b", "c": 1.0}
    with pytest.raises(TypeError, match="missing"):
        Arguments(positional).bind((), {})


def colourful(colour: Colour, choice: Literal["a", "b"] = "a") -> None: ...
def wrapped(data: str, raw: bytes = b"") -> None: ...
def impossible(value: Point | Order) -> None: ...


class Picky(msgspec.Struct):
    secret: str

    def __post_init__(self) -> None:
        assert self.secret != "sk-live", self.secret


def picky(key: Picky) -> None: ...


@pytest.mark.parametrize(
    ("function", "payload"),
    [
        (colourful, b'[["sk-live"],{}]'),
        (colourful, b'[["red","sk-live"],{}]'),
        (picky, b'[[{"secret":"sk-live"}],{}]'),
        (positional, b'[["sk-live"],{}]'),
        (typed, b'[["sk-live"],{}]'),
    ],
)
def test_no_error_repeats_what_was_sent(function: Callable[..., Any], payload: bytes) -> None:
    with pytest.raises(InvalidInput) as refused:
        Arguments(function).read(payload)
    assert refused.value.field.startswith("argument")
    assert "sk-live" not in str(refused.value)


def test_bytes_for_a_parameter_of_another_type_are_refused() -> None:
    arguments = Arguments(wrapped)
    assert arguments.read(arguments.write(("x", b"y"), {})) == (["x", b"y"], {})
    for args, kwargs in (((b"x",), {}), ((), {"data": b"x"})):
        with pytest.raises(InvalidInput, match="annotate the parameter as bytes"):
            arguments.write(args, kwargs)
    with pytest.raises(InvalidInput, match="annotate the parameter as bytes"):
        Arguments(loose).write((b"x",), {})


def test_an_annotation_that_json_cannot_be_decoded_into_is_reported() -> None:
    with pytest.raises(InvalidInput, match="argument 'value': has an annotation"):
        Arguments(impossible).write((Point(1),), {})
