"""Failed jobs by task and error group, out of the newest."""

from __future__ import annotations

import msgspec

from ...model import listings
from ...model.listings import ERROR_TAIL, FailureGroup, largest_first
from .reading import View


def failures(view: View, queue: str | None, task: str | None, limit: int) -> list[FailureGroup]:
    """The largest groups."""
    most = listings.MOST_FAILURES
    if queue is None:
        seqs = [seq for (seq,) in view.all("failed_newest", most + 1)]
    else:
        row = view.one("queue_by_name", queue)
        seqs = [] if row is None else [seq for (seq,) in view.all("failed_newest_of_queue", row[0], most + 1)]
    newest: dict[tuple[str, str], tuple[float, int, str]] = {}
    counts: dict[tuple[str, str], int] = {}
    firsts: dict[tuple[str, str], float] = {}
    for of, group, reason, finished_at, seq in view.all("failed_jobs", msgspec.json.encode(seqs[:most]).decode()):
        if task in (None, of):
            key = (of, group)
            counts[key] = counts.get(key, 0) + 1
            firsts[key] = min(finished_at, firsts.get(key, finished_at))
            newest[key] = max((finished_at, seq, reason), newest.get(key, (0.0, 0, "")))
    exact = len(seqs) <= most
    found = []
    for (of, group), (last_at, seq, reason) in newest.items():
        row = (of, group, counts[of, group], firsts[of, group], last_at, reason, str(seq), None)
        found.append(FailureGroup.of(row, exact=exact))
    return [_shown(view, each) for each in largest_first(found, limit)]


def _shown(view: View, group: FailureGroup) -> FailureGroup:
    """The group with its example, which was known by its number."""
    id, error = view.one("failed_example", int(group.example_id), ERROR_TAIL)
    return msgspec.structs.replace(group, example_id=id, error_line=listings.last_line(error))
