"""Keys built from a task's arguments: ``user:{user}`` with ``user="ann"`` is the lane ``user:ann``.

Templates are checked when the task is created, so that a misspelt parameter is an error at import, not at the first
enqueue. Only templates written in code are filled: a key passed to `options()` is used literally, because it may
contain user input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from string import Formatter
from typing import Any

from ..errors import InvalidInput
from .names import check_key, shown

_formatter = Formatter()


class Template:
    """A key with placeholders: names of parameters, and attributes or items of them."""

    def __init__(self, field: str, text: str, parameters: frozenset[str]) -> None:
        self._field = field
        self._text = text
        self._placeholders: list[str] = []
        try:
            pieces = list(_formatter.parse(text))
        except (ValueError, TypeError) as exc:
            raise InvalidInput(field, f"{shown(text)} is not a template ({exc}); write {{{{ for a brace") from None
        for _literal, placeholder, spec, conversion in pieces:
            if placeholder is None:
                continue
            if spec or conversion:
                raise InvalidInput(field, f"{shown(text)}: write {{{placeholder}}} without a format")
            name = placeholder.partition(".")[0].partition("[")[0]
            if name not in parameters:
                known = ", ".join(sorted(parameters)) or "none"
                raise InvalidInput(
                    field, f"{shown(text)} refers to {name!r}, which is not a parameter (parameters: {known})"
                )
            self._placeholders.append(placeholder)
        if not self._placeholders:
            check_key(field, text)

    @property
    def text(self) -> str:
        """The template as it was written."""
        return self._text

    @property
    def constant(self) -> bool:
        """Whether it is the same key for every call."""
        return not self._placeholders

    def fill(self, arguments: Mapping[str, Any]) -> str:
        """Return the key of a call. None and empty values are rejected: unrelated jobs would share one lane."""
        for placeholder in self._placeholders:
            try:
                value, _ = _formatter.get_field(placeholder, (), arguments)
            except (AttributeError, LookupError, TypeError) as exc:
                raise InvalidInput(self._field, f"argument {placeholder!r} cannot be read ({exc!r})") from None
            if isinstance(value, Collection) and not isinstance(value, str):
                raise InvalidInput(
                    self._field,
                    f"argument {placeholder!r} is a {type(value).__name__}; use one of its items or attributes",
                )
            if value is None or value == "":
                raise InvalidInput(self._field, f"argument {placeholder!r} is {value!r}; a key needs a non-empty value")
        return check_key(self._field, self._text.format_map(arguments))
