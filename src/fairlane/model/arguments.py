"""The parameters of a task's function: bind a call, encode it as a payload, decode it into the annotated types.

A call is decoded once before it is sent, so arguments that a worker could not decode are rejected by the caller.
Annotations are resolved at first use, not at decoration: they may refer to names that are defined further down.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from inspect import Parameter
from typing import Any

from ..errors import InvalidInput
from . import codec

NO_ARGUMENTS = b"[[],{}]"


class Arguments:
    """The parameters and the return type of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._signature = inspect.signature(function)
        self.names = frozenset(self._signature.parameters)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return every parameter with its value, defaults included. Raises TypeError as the call itself would."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError as the call itself would."""
        if kwargs or len(args) != self._exact:
            self._signature.bind(*args, **kwargs)

    def write(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Return the payload of a call. Raises `InvalidInput` naming the argument that a worker could not decode."""
        if not args and not kwargs:
            return NO_ARGUMENTS
        payload = codec.encode_call(args, kwargs)
        if not kwargs and tuple(map(type, args)) == self._simple:
            # These types always decode to the value that was encoded: no round trip is needed.
            return payload
        read_args, read_kwargs = self.read(payload)
        _refuse_text_for_bytes(enumerate(args, start=1), read_args)
        _refuse_text_for_bytes(kwargs.items(), read_kwargs.values())
        return payload

    def read(self, payload: bytes) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a payload, each as a value of its annotated type."""
        if payload == NO_ARGUMENTS:
            args: list[Any] = []
            kwargs: dict[str, Any] = {}
        else:
            raw_args, raw_kwargs = codec.decode_call(payload)
            positional, rest = self._positional
            args = [
                (positional[n] if n < len(positional) else rest or _refuse(n)).read(raw)
                for n, raw in enumerate(raw_args)
            ]
            kwargs = {name: self._named(name).read(raw) for name, raw in raw_kwargs.items()} if raw_kwargs else {}
        if kwargs or len(args) != self._exact:
            try:
                self._signature.bind(*args, **kwargs)
            except TypeError as exc:
                raise InvalidInput(
                    "payload", f"does not match the parameters of {self._function.__name__}: {exc}"
                ) from None
        return args, kwargs

    @cached_property
    def result(self) -> codec.Reader[Any]:
        """Decodes a result into the annotated return type; into any JSON value when there is no annotation."""
        return codec.Reader("result", self._hints.get("return", Any))

    @cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return typing.get_type_hints(self._function, include_extras=True)
        except (NameError, AttributeError, TypeError, SyntaxError) as exc:
            raise InvalidInput(
                "task",
                f"an annotation of {self._function.__qualname__} cannot be resolved ({exc}); "
                "import its name at run time, not only under TYPE_CHECKING",
            ) from None

    def _reader(self, parameter: Parameter) -> codec.Reader[Any]:
        field = f"argument {parameter.name!r}"
        try:
            return codec.Reader(field, self._hints.get(parameter.name, Any))
        except TypeError as exc:
            raise InvalidInput(field, f"has an annotation that JSON cannot be decoded into: {exc}") from None

    @cached_property
    def _positional(self) -> tuple[list[codec.Reader[Any]], codec.Reader[Any] | None]:
        """Readers of the positional parameters in order, and of ``*args``."""
        kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        parameters = self._signature.parameters.values()
        rest = [p for p in parameters if p.kind is Parameter.VAR_POSITIONAL]
        return [self._reader(p) for p in parameters if p.kind in kinds], self._reader(rest[0]) if rest else None

    @cached_property
    def _keywords(self) -> tuple[dict[str, codec.Reader[Any]], codec.Reader[Any] | None]:
        kinds = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        parameters = self._signature.parameters.values()
        rest = [p for p in parameters if p.kind is Parameter.VAR_KEYWORD]
        return {p.name: self._reader(p) for p in parameters if p.kind in kinds}, self._reader(rest[0]) if rest else None

    def _named(self, name: str) -> codec.Reader[Any]:
        named, rest = self._keywords
        reader = named.get(name) or rest
        if reader is None:
            raise InvalidInput(f"argument {name!r}", f"is not a parameter of {self._function.__name__}")
        return reader

    @cached_property
    def _simple(self) -> tuple[Any, ...] | None:
        """The types of all parameters if each is a JSON scalar; None if every payload must be decoded to check it."""
        types = tuple(self._hints.get(name) for name in self._signature.parameters)
        return types if self._exact >= 0 and all(type_ in (bool, int, float, str) for type_ in types) else None

    @cached_property
    def _exact(self) -> int:
        """The number of positional arguments that needs no further check; -1 if every call must be bound."""
        kinds = {p.kind for p in self._signature.parameters.values()}
        plain = kinds <= {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}
        return len(self._signature.parameters) if plain else -1


def _refuse_text_for_bytes(given: Iterable[tuple[object, Any]], read: Iterable[Any]) -> None:
    """JSON has no bytes: they are encoded as text, and only a parameter annotated as bytes decodes them again."""
    for (name, value), again in zip(given, read, strict=True):
        if isinstance(value, bytes | bytearray | memoryview) and isinstance(again, str):
            raise InvalidInput(
                f"argument {name!r}", "is bytes and would arrive as str; annotate the parameter as bytes"
            )


def _refuse(position: int) -> codec.Reader[Any]:
    raise InvalidInput(f"argument {position + 1}", "is one too many: the task takes fewer positional arguments")
