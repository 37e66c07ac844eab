"""Arguments and results on their way through JSON: what comes back, and what is refused before it is sent."""

import enum
import math
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.errors import InvalidInput
from fairlane.model import codec
from fairlane.model.names import PAYLOAD_BYTES
from tests.model.bad_values import INFINITY, NAN, NOT_JSON, refused_field, short


@dataclass
class Point:
    x: Any
    y: Any = None


class Box(msgspec.Struct):
    inside: Any


class Pair(NamedTuple):
    left: Any
    right: Any = 1


class Unknown:
    """Neither JSON nor a model."""


class Colour(enum.Enum):
    RED = "red"
    NONE = NAN


class Model:
    """Has the interface of a Pydantic model: `model_dump`, `model_validate`, and a ValueError with `errors()`."""

    def __init__(self, size: Any) -> None:
        self.size = size

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        assert mode == "json", "dates and the like have to be text already"
        return {"size": self.size}

    @classmethod
    def model_validate(cls, value: Any) -> "Model":
        if not isinstance(value, dict) or not isinstance(value.get("size"), int):
            raise ModelError(value)
        return cls(value["size"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and other.size == self.size

    __hash__ = None  # type: ignore[assignment]  # how a class says it has none


class ModelError(ValueError):
    """Like Pydantic's: its text repeats the input, and `errors()` lists the problems."""

    def errors(self) -> list[dict[str, Any]]:
        return [{"loc": ("size",), "msg": "should be an integer", "input": self.args[0]}]


@dataclass
class Order:
    id: UUID
    price: Decimal
    at: datetime
    day: date
    took: timedelta
    raw: bytes
    where: list[Pair]
    note: str | None = None


class Parcel(msgspec.Struct, frozen=True):
    order: Order
    weights: dict[str, float]
    tags: frozenset[str]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=12,
)
moments = st.datetimes(timezones=st.just(UTC))
orders = st.builds(
    Order,
    id=st.uuids(),
    price=st.decimals(allow_nan=False, allow_infinity=False),
    at=moments,
    day=st.dates(),
    took=st.timedeltas(timedelta(0), timedelta(days=1_000)),
    raw=st.binary(max_size=20),
    where=st.lists(st.builds(Pair, st.integers(), st.integers()), max_size=2),
    note=st.none() | st.text(st.characters(codec="utf-8")),
)


def through(value: Any, type_: Any) -> Any:
    return codec.decode("value", codec.encode("value", value), type_)


@given(json_values)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert through(value, Any) == value


@given(orders)
def test_a_dataclass_comes_back_with_its_dates_ids_decimals_and_bytes(order: Order) -> None:
    assert through(order, Order) == order


@given(
    st.builds(
        Parcel,
        orders,
        st.dictionaries(st.text("ab"), st.floats(-1e9, 1e9), max_size=3),
        st.frozensets(st.text("ab")),
    )
)
def test_a_struct_comes_back_with_all_that_is_in_it(parcel: Parcel) -> None:
    assert through([parcel], list[Parcel]) == [parcel]


def test_a_model_comes_back_alone_and_inside_of_other_values() -> None:
    assert through(Model(3), Model) == Model(3)
    assert through({"models": [Model(1), Model(2)]}, dict[str, list[Model]]) == {"models": [Model(1), Model(2)]}


def test_none_is_a_value_like_any_other() -> None:
    assert codec.encode("result", None) == b"null"
    assert through([None, {"a": None}, Box(None), Point(None)], Any) == [
        None,
        {"a": None},
        {"inside": None},
        {"x": None, "y": None},
    ]


def test_whole_numbers_of_any_size_come_back() -> None:
    assert through([2**70, -(2**70)], list[int]) == [2**70, -(2**70)]


PLACES: dict[str, Any] = {
    "itself": lambda x: x,
    "list": lambda x: [1, [x]],
    "tuple": lambda x: (x,),
    "set": lambda x: {x, 1.5},
    "frozenset": lambda x: frozenset({x}),
    "dict value": lambda x: {"a": {"b": x}},
    "dict key": lambda x: {"a": {x: 1}},
    "dataclass": Point,
    "struct": Box,
    "named tuple": Pair,
    "model": Model,
    "all of them": lambda x: [{"a": Point(Box([Pair(Model((x,)))]))}],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [NAN, INFINITY, -INFINITY])
def test_nan_and_infinity_are_refused_wherever_they_hide(place: str, number: float) -> None:
    assert refused_field(codec.encode, "result", PLACES[place](number)) == "result"


def test_nan_as_the_value_of_an_enum_is_refused() -> None:
    assert refused_field(codec.encode, "result", Colour.NONE) == "result"
    assert codec.encode("result", Colour.RED) == b'"red"'


@pytest.mark.parametrize("text", ["null", "nan", "NaN", "inf", "-inf", "Infinity"])
def test_words_that_look_like_nan_are_only_words(text: str) -> None:
    value = [text, {text: text}, Point(text), Model(text), None, 1.5]
    assert through(value, Any) == [text, {text: text}, {"x": text, "y": None}, {"size": text}, None, 1.5]


@given(json_values)
def test_finding_nan_agrees_with_looking_at_every_number(value: Any) -> None:
    spoiled = [value, {"spoiled": [value, NAN]}]
    assert refused_field(codec.encode, "result", spoiled) == "result"


def looped(make: Any) -> Any:
    """A value that contains itself."""
    loop = make(None)
    if isinstance(loop, list):
        loop[0] = loop
    elif isinstance(loop, dict):
        loop["a"] = loop
    else:
        setattr(loop, next(iter(vars(loop) if hasattr(loop, "__dict__") else ["inside"])), loop)
    return loop


@pytest.mark.parametrize(
    "make",
    [lambda x: [x], lambda x: {"a": x}, Point, Box, Model],
    ids=["list", "dict", "dataclass", "struct", "model"],
)
def test_a_value_that_contains_itself_is_refused(make: Any) -> None:
    assert refused_field(codec.encode, "result", looped(make)) == "result"


def nested(depth: int, leaf: Any) -> list[Any]:
    value = [leaf]
    for _ in range(depth):
        value = [value]
    return value


def test_deep_values_are_taken_or_refused_but_never_break() -> None:
    assert codec.encode("result", nested(500, None)) == b"[" * 501 + b"null" + b"]" * 501
    assert refused_field(codec.encode, "result", nested(500, NAN)) == "result"
    assert refused_field(codec.encode, "result", nested(100_000, None)) == "result"


def a_function() -> None: ...


@pytest.mark.parametrize(
    "value",
    [
        *(object(), a_function, int, Point, Model, 1j, range(3), iter([1]), {(1, 2): 3}, {None: 1}, NotImplemented),
        *(ValueError("x"), "lone surrogate \ud800", {"\udfff": 1}, [object()], Point(object()), Model(object())),
    ],
    ids=short,
)
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    assert refused_field(codec.encode, "result", value) == "result"


def test_a_value_is_sent_up_to_its_size_and_not_a_byte_more() -> None:
    assert len(codec.encode("payload", "x" * (PAYLOAD_BYTES - 2))) == PAYLOAD_BYTES
    assert refused_field(codec.encode, "payload", "x" * (PAYLOAD_BYTES - 1)) == "payload"
    assert codec.encode("progress", "xx", 4) == b'"xx"'
    assert refused_field(codec.encode, "progress", "xxx", 4) == "progress"


@given(st.lists(json_values, max_size=3), st.dictionaries(st.text("abc", min_size=1), json_values, max_size=3))
def test_a_call_comes_back_argument_by_argument(args: list[Any], kwargs: dict[str, Any]) -> None:
    raw_args, raw_kwargs = codec.decode_call(codec.encode_call(args, kwargs))
    assert [codec.decode("argument", raw, Any) for raw in raw_args] == args
    assert {name: codec.decode("argument", raw, Any) for name, raw in raw_kwargs.items()} == kwargs


def test_the_refusal_of_a_call_names_the_argument() -> None:
    assert refused_field(codec.encode_call, [1, NAN], {}) == "argument 2"
    assert refused_field(codec.encode_call, [object()], {"size": NAN}) == "argument 1"
    assert refused_field(codec.encode_call, [1], {"name": "x", "size": Point(NAN)}) == "argument 'size'"


def test_a_call_that_is_too_large_only_as_a_whole_is_refused_as_the_payload() -> None:
    half = "x" * (PAYLOAD_BYTES // 2)
    assert refused_field(codec.encode_call, [half, half], {}) == "payload"
    assert refused_field(codec.encode_call, [half * 2], {}) == "argument 1"


@pytest.mark.parametrize(
    "payload",
    [raw for raw in NOT_JSON if isinstance(raw, bytes)]
    + [
        b"[]",
        b"[[]]",
        b"{}",
        b"null",
        b"5",
        b"[{},[]]",
        b"[[],{},1]",
        b'[[],{"\xff":1}]',
        b"[[" + b"[" * 99_999 + b"]" * 99_999 + b"],{}]",
    ],
    ids=short,
)
def test_a_payload_that_is_no_call_is_refused(payload: bytes) -> None:
    assert refused_field(codec.decode_call, payload) == "payload"


@pytest.mark.parametrize(
    ("raw", "type_"),
    [
        (b'"5"', int),
        (b"1.5", int),
        (b"1", str),
        (b"null", int),
        (b"1e999", float),
        (b'"not a date"', datetime),
        (b'"not a uuid"', UUID),
        (b'{"x":1}', Order),
        (b"{}", Point),
        (b"[1]", Box),
        (b'"not UTF-8 \xff"', str),
        (b"[" * 100_000, Any),
        (b"{", Any),
        (b"{}", Unknown),
    ],
    ids=short,
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_argument(raw: bytes, type_: Any) -> None:
    assert refused_field(codec.decode, "argument 'size'", raw, type_) == "argument 'size'"


def test_the_error_of_a_model_names_the_problem_and_not_the_input() -> None:
    with pytest.raises(InvalidInput, match=r"^argument 1: size: should be an integer") as caught:
        codec.decode("argument 1", b'{"size": "secret"}', Model)
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidInput, match=r"^argument 1: size: should be an integer.*\$\[0\]") as caught:
        codec.decode("argument 1", b'[{"size": "secret"}]', list[Model])
    assert "secret" not in str(caught.value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_comes_back_exactly(number: float) -> None:
    back = through(number, float)
    assert back == number
    assert math.copysign(1, back) == math.copysign(1, number)


class Safe(str):
    """As Django's SafeString."""


class Count(int):
    """A number with methods of its own."""


class Ratio(float):
    """The same."""


@pytest.mark.parametrize(("value", "sent"), [(Safe("<b>"), "<b>"), (Count(7), 7), (Ratio(0.5), 0.5)])
def test_a_subclass_of_a_plain_type_is_sent_as_that_type(value: Any, sent: object) -> None:
    assert msgspec.json.decode(codec.encode("result", {"inside": [value]})) == {"inside": [sent]}


def test_a_subclass_of_float_may_not_be_nan_either() -> None:
    with pytest.raises(InvalidInput, match="NaN"):
        codec.encode("result", Ratio("nan"))
