"""JSON Schemas of the arguments and results of tasks, from their annotations. Other types accept any value."""

from __future__ import annotations

import inspect
from functools import lru_cache
from inspect import Parameter
from typing import Any

import msgspec

from ..errors import InvalidInput
from ..task import Task

SCHEMA = "https://json-schema.org/draft/2020-12/schema"


def argument_schema(task: Task[..., Any]) -> dict[str, Any]:
    """The schema of an object with every argument by name."""
    hints = _hints(task)
    properties: dict[str, Any] = {}
    required: list[str] = []
    more: Any = False
    for parameter in inspect.signature(task.function).parameters.values():
        schema = type_schema(hints.get(parameter.name, Any))
        if parameter.kind is Parameter.VAR_KEYWORD:
            more = schema
        elif parameter.kind is not Parameter.VAR_POSITIONAL:
            properties[parameter.name] = schema
            if parameter.default is Parameter.empty:
                required.append(parameter.name)
    return {
        "$schema": SCHEMA,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": more,
    }


def result_schema(task: Task[..., Any]) -> dict[str, Any]:
    """The schema of the return value."""
    return type_schema(_hints(task).get("return", Any))


def _hints(task: Task[..., Any]) -> dict[str, Any]:
    try:
        return task.arguments._hints
    except InvalidInput:
        return {}


def type_schema(type_: Any) -> dict[str, Any]:
    """The schema of one annotation."""
    try:
        return _schema(type_)
    except TypeError:  # not hashable
        return _made(type_)


@lru_cache(maxsize=1024)
def _schema(type_: Any) -> dict[str, Any]:
    return _made(type_)


def _made(type_: Any) -> dict[str, Any]:
    try:
        return msgspec.json.schema(type_, schema_hook=_other)
    except (TypeError, ValueError, NotImplementedError):
        return {}


def _other(type_: type[Any]) -> dict[str, Any]:
    describe = getattr(type_, "model_json_schema", None)
    found: dict[str, Any] = describe() if callable(describe) else {}
    return found
