"""The plans of statements as PostgreSQL really carried them out, also of those inside functions, which EXPLAIN does not
show."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

TELL = """
LOAD 'auto_explain';
SET auto_explain.log_min_duration = 0;
SET auto_explain.log_nested_statements = on;
SET auto_explain.log_level = notice;
SET auto_explain.log_format = json;
SET auto_explain.log_analyze = on;
SET auto_explain.log_timing = off;
"""
BE_SILENT = "SET auto_explain.log_min_duration = -1"


@dataclass(frozen=True)
class Node:
    """One step of a plan."""

    kind: str
    table: str | None
    index: str | None
    bounded: bool
    """Whether the search has a condition; without one it reads the whole index."""
    rows: float
    """Rows that it read, in all loops."""


@dataclass(frozen=True)
class Plan:
    """The plan and execution of one statement."""

    text: str
    nodes: tuple[Node, ...]

    @property
    def indexes(self) -> set[str]:
        """The indexes that it used."""
        return {node.index for node in self.nodes if node.index}

    @property
    def scanned(self) -> set[str]:
        """The tables that it read completely."""
        return {node.table for node in self.nodes if node.kind == "Seq Scan" and node.table}

    @property
    def walked(self) -> set[str]:
        """The indexes that it read without a condition."""
        return {node.index for node in self.nodes if node.index and not node.bounded}

    @property
    def rows(self) -> float:
        """Rows of tables that it read, without those that the driver read from the catalog."""
        return sum(node.rows for node in self.nodes if node.table and not node.table.startswith("pg_"))

    @property
    def sorts(self) -> bool:
        """Whether it sorted rows, because no index had their order."""
        return any("Sort" in node.kind for node in self.nodes)


async def plans(connection: Any, work: Callable[[], Awaitable[object]]) -> list[Plan]:
    """The plans of everything that `work` runs on the connection, which must be a superuser's."""
    told: list[str] = []

    def receive(_: object, message: Any) -> None:
        told.append(message.message)

    await connection.execute(TELL)
    connection.add_log_listener(receive)
    try:
        await work()
    finally:
        connection.remove_log_listener(receive)
        await connection.execute(BE_SILENT)
    parts = (message.partition("plan:\n")[2] for message in told)
    return [_plan(json.loads(part)) for part in parts if part]


def _plan(told: dict[str, Any]) -> Plan:
    return Plan(told["Query Text"], tuple(map(_node, _steps(told["Plan"]))))


def _steps(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for below in node.get("Plans", ()):
        yield from _steps(below)


def _node(step: dict[str, Any]) -> Node:
    removed = step.get("Rows Removed by Filter", 0) + step.get("Rows Removed by Index Recheck", 0)
    rounds = step.get("Actual Loops", 0)
    return Node(
        kind=step["Node Type"],
        table=step.get("Relation Name"),
        index=step.get("Index Name"),
        bounded="Index Cond" in step,
        rows=(step.get("Actual Rows", 0) + removed) * rounds,
    )
