"""Where a new sticky key goes: the live worker with the fewest open bindings, and of those the lowest index.

Low indices fill first, so the high ones are free to be switched off when a fleet shrinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def choose(live: Iterable[int], open_bindings: Mapping[int, int]) -> int | None:
    """The index to bind to, or None when no worker is live. Only live indices are ever chosen."""
    return min(live, key=lambda index: (open_bindings.get(index, 0), index), default=None)


def lowest_free(taken: Iterable[int]) -> int:
    """The index an unnamed worker gets: the lowest one nobody has."""
    used = set(taken)
    index = 0
    while index in used:
        index += 1
    return index
