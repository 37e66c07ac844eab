"""The scripts that change tokens: the files of `lua/`, called by their digest."""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha1
from importlib.resources import files

USUAL_CAP = 100
"""The most tokens of a list until a leader has counted the slots of all workers."""
LIST_SECONDS = 600
"""A list that gets no token for so long is removed: the sweep adds a token every second while one lacks."""
ALIVE_SECONDS = 5.0
"""For so long after a sweep workers rely on tokens, and poll rarely."""
MARGIN_SECONDS = 0.005
INTERRUPTION_SECONDS = 10
_FLAGS = "#!lua flags=allow-oom\n"
"""A server whose memory is full takes the few tokens too. It answers blocking calls, so workers would wait for them."""
_NUMBERS = {
    "USUAL_CAP": USUAL_CAP,
    "LIST_MILLISECONDS": LIST_SECONDS * 1000,
    "ALIVE_MILLISECONDS": round(ALIVE_SECONDS * 1000),
    "INTERRUPTION_MILLISECONDS": INTERRUPTION_SECONDS * 1000,
    "MARGIN_MICROSECONDS": round(MARGIN_SECONDS * 1_000_000),
}


@cache
def text(name: str) -> str:
    """A script, with numbers in the place of their names."""
    raw = (files("fairlane.store.postgresql_redis") / "lua" / f"{name}.lua").read_text()
    return _FLAGS + re.sub(rf"\b({'|'.join(_NUMBERS)})\b", lambda found: str(_NUMBERS[found[1]]), raw)


@cache
def digest(name: str) -> str:
    """What the server calls a script that it knows."""
    return sha1(text(name).encode(), usedforsecurity=False).hexdigest()
