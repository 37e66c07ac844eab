"""The OpenAPI document, generated from the table of operations and the structs of requests and responses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from .access import Scope
from .operation import Operation
from .problems import TITLES

CONVERTOR = re.compile(r"\{(\w+):\w+\}")
REF = "#/components/schemas/{name}"
ALWAYS = (400, 401, 403, 405, 408, 413, 414, 415, 421, 422, 429, 431, 500, 503)


class ProblemDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    """The invalid field, parameter or header."""
    retry_after: float | None = None
    """Seconds after which to repeat the request; also in the Retry-After header, in whole seconds."""


def openapi_document(operations: Sequence[Operation]) -> dict[str, Any]:
    """Generate the document of a service."""
    from .. import __version__

    shown = list(operations)
    types: list[Any] = [ProblemDocument]
    for each in shown:
        types += [kind for kind in (each.body, each.answer, each.lane_answer, each.query) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    by_type = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, Any] = {}
    for each in shown:
        path = CONVERTOR.sub(r"{\1}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, path, by_type, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fairlane",
            "version": __version__,
            "description": "Submit, watch and operate jobs. Times are seconds since 1970, durations are seconds.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(each: Operation, path: str, by_type: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    problem = {"$ref": REF.format(name="ProblemDocument")}
    content: dict[str, Any] = {}
    if each.answer is not None:
        content["schema"] = by_type[id(each.answer)]
    if each.lane_answer is not None:
        content["schema"] = {"anyOf": [content["schema"], by_type[id(each.lane_answer)]]}
    if each.shows is not None:
        content["example"] = each.shows
    success = {"description": each.summary, **({"content": {each.content: content}} if content else {})}
    responses: dict[str, Any] = {str(each.status): success}
    for status, text in each.also.items():
        responses[str(status)] = {
            "description": text,
            **({"content": {each.content: content}} if status != 204 else {}),
        }
    for status in (*ALWAYS, 404, 409, 501, 507):
        responses.setdefault(
            str(status),
            {"description": TITLES[status][1], "content": {"application/problem+json": {"schema": problem}}},
        )
    document: dict[str, Any] = {
        "operationId": each.name,
        "summary": each.summary,
        "description": inspect.cleandoc(each.handler.__doc__ or each.summary),
        "tags": [each.tag],
        "parameters": _parameters(each, path, by_type, components),
        "responses": responses,
        "security": [] if each.scope is Scope.PUBLIC else [{"token": []}],
        "x-scope": each.scope.value,
    }
    if each.body is not None:
        bodies = {"application/json": {"schema": by_type[id(each.body)], "example": each.example}}
        for kind, example in each.other_bodies.items():
            bodies[kind] = {"schema": {"type": "string"}, "example": example}
        document["requestBody"] = {"required": not each.body_optional, "content": bodies}
    return document


def _parameters(
    each: Operation, path: str, by_type: dict[int, Any], components: dict[str, Any]
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
            **_example(each, name),
        }
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if each.query is not None:
        schema = by_type[id(each.query)]
        schema = components[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        required = schema.get("required", ())
        found += [
            {"name": name, "in": "query", "required": name in required, "schema": kind, **_example(each, name)}
            for name, kind in schema["properties"].items()
        ]
    found += [
        {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in each.headers.items()
    ]
    return found


def _example(each: Operation, name: str) -> dict[str, Any]:
    return {"example": each.parameters[name]} if name in each.parameters else {}
