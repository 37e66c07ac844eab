"""Keys made of a task's arguments: ``user:{user}`` with ``user="ann"`` is the lane ``user:ann``.

Checked when the task is made, so that a misspelt parameter is an error at import, not at the first enqueue. Only
templates written in code are ever filled: a key given to `options()` is taken as it stands, because it may contain
words of a user.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from string import Formatter
from typing import Any

from ..errors import InvalidInput
from .names import check_key, shown

_formatter = Formatter()


class Template:
    """A key with places for arguments: names of parameters, and attributes or items of them."""

    def __init__(self, field: str, text: str, parameters: frozenset[str]) -> None:
        self._field = field
        self._text = text
        self._places: list[str] = []
        try:
            pieces = list(_formatter.parse(text))
        except (ValueError, TypeError) as exc:
            raise InvalidInput(field, f"{shown(text)} is not a template ({exc}); write {{{{ for a brace") from None
        for _literal, place, spec, conversion in pieces:
            if place is None:
                continue
            if spec or conversion:
                raise InvalidInput(field, f"{shown(text)}: give {{{place}}} without a format")
            name = place.partition(".")[0].partition("[")[0]
            if name not in parameters:
                known = ", ".join(sorted(parameters)) or "none"
                raise InvalidInput(field, f"{shown(text)} names {name!r}, which is no parameter (there are: {known})")
            self._places.append(place)
        if not self._places:
            check_key(field, text)

    @property
    def text(self) -> str:
        """The template as it was written."""
        return self._text

    @property
    def constant(self) -> bool:
        """Whether it is the same key for every call."""
        return not self._places

    def fill(self, arguments: Mapping[str, Any]) -> str:
        """The key of a call. A value that is None or empty is refused: it would put strangers into one lane."""
        for place in self._places:
            try:
                value, _ = _formatter.get_field(place, (), arguments)
            except (AttributeError, LookupError, TypeError) as exc:
                raise InvalidInput(self._field, f"argument {place!r} cannot be read ({exc!r})") from None
            if isinstance(value, Collection) and not isinstance(value, str):
                raise InvalidInput(self._field, f"argument {place!r} is a {type(value).__name__}; name one part of it")
            if value is None or value == "":
                raise InvalidInput(
                    self._field, f"argument {place!r} is {value!r}; a key needs something to be named by"
                )
        return check_key(self._field, self._text.format_map(arguments))
