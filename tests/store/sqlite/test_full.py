"""A disk without room: nothing is half written, what was acknowledged is there, and work goes on once there is room."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..schema_dump import dump, fresh_dump


def play(role: str, path: Path, limit: int) -> Any:
    """Play a role of `full_disk` in a process of its own, and return what it saw."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.store.full_disk", role, f"sqlite:///{path}", str(limit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("limit", [150_000, 200_000, 777_777, 3_000_000])
def test_a_full_disk_refuses_whole_calls_and_is_over_when_there_is_room(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "fairlane.db"
    seen = play("fill", path, limit)
    assert seen["refused"]
    assert seen["all_known"]
    assert seen["leaked"] == []
    assert seen["claimed"] == min(100, len(seen["stored"]))
    assert seen["completed"] == seen["claimed"]
    assert seen["created_later"]
    assert seen["differences"] == []
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    found = {id for (id,) in connection.execute("SELECT id FROM fairlane_job")}
    connection.close()
    assert found == {*seen["stored"], *seen["refused"]}


@pytest.mark.parametrize("limit", [0, 4_096, 20_000, 40_000, 100_000])
def test_a_store_that_there_is_no_room_for_is_made_once_there_is(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "fairlane.db"
    received = play("make", path, limit)
    assert received is not None
    assert "cannot grow" in received
    assert dump(path) == asyncio.run(fresh_dump())
