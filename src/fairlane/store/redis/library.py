"""The function library of this store: the texts of `lua/` in one, named after what they say.

Two versions of the code have two libraries, side by side on one server; each calls its own.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files

MODULES = (
    "head", "keys", "writes", "step", "catalog", "numbers", "tickets", "entries", "flows", "places", "limits",
    "bindings", "broadcasts", "outcomes", "damage", "admission", "arrivals", "idle", "single", "presence", "report",
    "answers", "batches", "dispatch", "settings", "pruning", "recounting", "reading", "standings", "losses",
    "passes", "verbs",
)  # fmt: skip


@cache
def _body() -> str:
    folder = files("fairlane.store.redis") / "lua"
    head, *modules = [(folder / f"{module}.lua").read_text() for module in MODULES]
    # What is local to a module is so here as well; Lua takes no more than 200 locals in one block.
    return "\n".join([head, *(f"do\n{module}end" for module in modules)])


@cache
def name() -> str:
    """What the library is called, and its functions begin with."""
    return f"fairlane_{sha256(_body().encode()).hexdigest()[:12]}"


@cache
def text() -> str:
    """The whole library, as FUNCTION LOAD takes it."""
    return f"#!lua name={name()}\nlocal NAME = '{name()}'\n{_body()}"


@cache
def function(verb: str) -> str:
    """The function of a verb."""
    return f"{name()}_{verb}"
