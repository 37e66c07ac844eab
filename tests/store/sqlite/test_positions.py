"""What the positions of several jobs cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairlane.model.job import NewJob, Priority
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.store.sqlite.positions import FAR
from fairlane.store.sqlite.reading import View
from fairlane.store.sqlite.store import SqliteStore

pytestmark = pytest.mark.anyio
RULES = {
    "no limit": (),
    "ordered": (LaneRule(pattern="user", limit=1),),
    "unordered": (LaneRule(pattern="user", limit=2, ordered=False),),
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
async def test_a_lane_is_counted_once_for_all_its_jobs(
    tmp_path: Path, rules: tuple[LaneRule, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await SqliteStore.open(f"sqlite:///{tmp_path / 'fairlane.db'}")
    try:
        await store.configure([SettingsChange(queue="default", declared=QueueSettings(lanes=rules))])
        jobs = [
            NewJob(id=f"{priority.label}-{n}", task="t", payload=b"[[],{}]", lane="user", priority=priority)
            for n in range(5)
            for priority in (Priority.LOW, Priority.HIGH, Priority.NORMAL)
        ]
        await store.enqueue(jobs)
        whole: list[tuple[Any, ...]] = []
        real = View.one

        def counted(self: View, name: str, *values: Any) -> Any:
            if name.startswith("place_") and values[-1] == FAR:
                whole.append((name, *values))
            return real(self, name, *values)

        monkeypatch.setattr(View, "one", counted)
        page = await store.lane_line("default", "user", limit=50)
        found = await store.positions([job.id for job in page.jobs])
        assert [(each.place, each.of, each.exact) for each in found if each is not None] == [
            (place, 15, True) for place in range(1, 16)
        ]
        assert whole
        assert len(whole) == len(set(whole))
    finally:
        await store.close()
