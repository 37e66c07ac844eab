"""The function library of this store: the files of `lua/` as one text, named after a digest of that text.

Two versions of the code load two libraries, which exist side by side on one server; each version calls its own.
A library is compiled and set up once per server. A script would define all its functions again with each call
(measured: 9 µs a call for 150 functions, 46 µs for 300 in a table).
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files

from ..codes import with_lua_codes

MODULES = (
    "keys", "write_buffer", "step", "queue_cache", "id_sets", "packed_job_record", "job_record", "job_content",
    "fair_order", "lane_limits", "lane_limit_changes", "bindings", "broadcasts", "endings", "damage", "enqueue",
    "enqueue_batch", "idle_workers", "enqueue_one", "sessions", "finish", "claim_answer", "claim_batch", "claim",
    "settings", "prune", "recount", "find", "reading", "ended", "positions", "data_loss", "maintenance", "verbs",
)  # fmt: skip
"""The files of `lua/` behind `head`, in the order of loading. Each fills the table of its name."""


@cache
def _body() -> str:
    folder = files("fairlane.store.redis") / "lua"
    head, *modules = [(folder / f"{module}.lua").read_text() for module in ("head", *MODULES)]
    # One list of tables: a file may call functions of any other. The blocks keep a file's locals to itself; Lua
    # allows at most 200 locals in one block.
    tables = f"local {', '.join(MODULES)} = {', '.join('{}' for _ in MODULES)}\n"
    return with_lua_codes("\n".join([tables, head, *(f"do\n{module}end" for module in modules)]))


@cache
def name() -> str:
    """The name of the library, and the prefix of its functions."""
    return f"fairlane_{sha256(_body().encode()).hexdigest()[:12]}"


@cache
def text() -> str:
    """The whole library, as FUNCTION LOAD takes it."""
    return f"#!lua name={name()}\nlocal NAME = '{name()}'\n{_body()}"


@cache
def function(verb: str) -> str:
    """The name of the function for a verb."""
    return f"{name()}_{verb}"
