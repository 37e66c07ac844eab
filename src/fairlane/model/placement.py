"""Which worker a new sticky key is bound to: the live one with the fewest open bindings, and of those the lowest index.

Low indices fill first, so that the high ones can be switched off when a fleet shrinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def choose(live: Iterable[int], open_bindings: Mapping[int, int]) -> int | None:
    """Return the index to bind to; None when no worker is live. Only live indices are chosen."""
    return min(live, key=lambda index: (open_bindings.get(index, 0), index), default=None)


def lowest_free(taken: Iterable[int]) -> int:
    """Return the index for an unnamed worker: the lowest one that is not taken."""
    used = set(taken)
    index = 0
    while index in used:
        index += 1
    return index
