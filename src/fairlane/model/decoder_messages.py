"""What a decoder says about a wrong value, without the value: errors never show what was sent.

Of a value that is none of an enum or a `Literal`, the allowed values are named instead; they are part of the type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec.inspect as types

from . import names

_VALUE = re.compile(r"Invalid enum value .*?(?P<at> - at (?:`key` in )?`[^`]*`)?\Z", re.DOTALL)
"""The only decoder message that repeats a value. The value may look like the path at the end of the message."""
_STEP = re.compile(r"\.([^.\[`]+)|\[(\d+|\.\.\.)\]")
MOST_VALUES = 20


def hide_values(message: str, type_: Any = None) -> str:
    """Remove sent values from a decoder message. With the type that was decoded, name the allowed ones."""
    found = _VALUE.search(message)
    if found is None:
        return message
    at = found["at"] or ""
    allowed = [] if type_ is None else _allowed_values(type_, at)
    words = f"must be {_listed(allowed)}" if allowed else "Invalid enum value"
    return message[: found.start()] + words + at


def _allowed_values(type_: Any, at: str) -> list[Any]:
    """The values of the enums and literals at a place; none if the place cannot be found in the type."""
    try:
        nodes = list(_alternatives([types.type_info(type_)]))
    except Exception:
        # The error has a better cause to report than a type that cannot be described.
        return []
    for name, number in _STEP.findall(at):
        nodes = list(_alternatives(inner for node in nodes for inner in _inside(node, name, number)))
    if "`key`" in at:
        nodes = list(_alternatives(node.key_type for node in nodes if isinstance(node, types.DictType)))
    values: list[Any] = []
    for node in nodes:
        if isinstance(node, types.LiteralType):
            values += node.values
        elif isinstance(node, types.EnumType):
            values += [member.value for member in node.cls]
    return list(dict.fromkeys(values))


def _alternatives(nodes: Iterable[types.Type]) -> Iterator[types.Type]:
    for node in nodes:
        if isinstance(node, types.Metadata):
            yield from _alternatives([node.type])
        elif isinstance(node, types.UnionType):
            yield from _alternatives(node.types)
        else:
            yield node


def _inside(node: types.Type, name: str, number: str) -> Iterator[types.Type]:
    """The types of what is one step further inside."""
    match node:
        case types.StructType() | types.DataclassType() | types.TypedDictType() | types.NamedTupleType():
            fields = node.fields
            if name:
                yield from (field.type for field in fields if field.encode_name == name)
            elif number.isdecimal() and int(number) < len(fields):
                yield fields[int(number)].type
        case types.DictType() if not name:
            yield node.value_type
        case types.TupleType() if number.isdecimal():
            yield from node.item_types[int(number) : int(number) + 1]
        case types.ListType() | types.SetType() | types.FrozenSetType() | types.VarTupleType() if number:
            yield node.item_type


def _listed(values: list[Any]) -> str:
    shown = [names.shown(value) if isinstance(value, str) else str(value) for value in values[:MOST_VALUES]]
    if len(values) > MOST_VALUES:
        return f"one of {', '.join(shown)}, …"
    return " or ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
