"""The function library of the Redis store, called as it stands: what each verb takes, answers and leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis

from fairlane.backends.redis import library
from tests.servers import valkey

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode
SCHEDULED, PENDING, RUNNING, COMPLETED, FAILED, CANCELLED = range(1, 7)


class Functions:
    """Calls the functions of the library on a namespace of its own, at a time that the test sets."""

    def __init__(self, port: int, prefix: str) -> None:
        self.server = redis.Redis(port=port)
        self.prefix = prefix
        self.now = 1_000.0
        if not self.server.function_list(library.name()):
            self.server.function_load(library.text())

    def call(self, verb: str, *args: Any) -> Any:
        time = repr(self.now)
        answer = self.server.fcall(library.function(verb), 1, self.prefix, time, time, *args)
        return decode(answer) if isinstance(answer, bytes) else answer

    def register(self, id: str = "w", *, total: int = 10, host: str = "here", **more: Any) -> None:
        slots = {"total": total, "high": 0, "normal": 0}
        session = {"id": id, "kind": "worker", "host": host, "pid": 1, "pool": "default", "lease": 15.0, "slots": slots}
        answer = self.call("register", encode(session | {"queues": ["q"]} | more))
        assert answer == {"done": True}, answer

    def enqueue(self, *ids: str, content: bytes = b"content", **fields: Any) -> Any:
        jobs = [{"id": id, "task": "task", "queue": "q", "class": 1} | fields for id in ids]
        return self.call("enqueue", encode(jobs), *(part for _ in ids for part in (content, b"")))

    def claim(self, number: int, total: int = 10, session: str = "w") -> list[tuple[str, int]]:
        answer = self.call("claim", session, encode([number, total, asks(total)]))
        return claimed(answer)

    def finish(self, id: str, fence: int, move: str = "completed", session: str = "w", **more: Any) -> Any:
        transition = {"id": id, "fence": fence, "move": move} | more
        answer = self.call("finish", session, encode([transition]), b"", b'"done"')
        return decode(answer[0])["verdicts"][0]

    def settings(self, **settings: Any) -> None:
        seen = int(self.server.hget(self.prefix + "counter", "settings") or 0)
        change = {"queue": "q", "version": 1, "declared": "{}", "lanes_changed": True}
        change["settings"] = msgspec.json.encode(settings).decode()
        assert self.call("configure", seen, encode([change])) == {"done": True}

    def left(self) -> set[str]:
        return {key.decode().removeprefix(self.prefix) for key in self.server.scan_iter(f"{self.prefix}*", count=1000)}


def asks(most: int) -> list[list[Any]]:
    """What a worker asks for: its inbox, and the queue, class by class."""
    return [[queue, class_, most, False] for class_ in range(3) for queue in (False, "q")]


def claimed(answer: list[bytes]) -> list[tuple[str, int]]:
    """The ids and fences in the answer to a claim."""
    return [tuple(decode(answer[place])[:2]) for place in range(2, len(answer), 3)]


@pytest.fixture
def functions() -> Iterator[Functions]:
    server = valkey.server()
    made = Functions(server.port, server.fresh_prefix())
    made.register()
    yield made
    made.server.close()


def test_a_job_is_stored_claimed_and_finished(functions: Functions) -> None:
    assert functions.enqueue("a", "b") == {"answers": [["a", True, PENDING], ["b", True, PENDING]]}
    assert functions.claim(1) == [("a", 1), ("b", 1)]
    assert functions.claim(2) == []
    assert functions.finish("a", 1, result=6) == ["applied", COMPLETED]
    assert functions.finish("a", 1, result=6) == ["repeated", COMPLETED]
    assert functions.finish("b", 2, result=6) == ["stale", RUNNING]


def test_a_claim_whose_answer_was_lost_is_answered_again(functions: Functions) -> None:
    functions.enqueue("a", "b", "c")
    assert functions.claim(1, total=2) == [("a", 1), ("b", 1)]
    assert functions.claim(1, total=2) == [("a", 1), ("b", 1)]
    assert functions.call("claim", "w", encode([0, 1, asks(1)]))["refused"]["code"] == "stale"


def test_the_same_id_is_one_job_and_other_content_conflicts_before_anything_is_written(functions: Functions) -> None:
    functions.enqueue("a")
    before = functions.server.hlen(functions.prefix + "id")
    assert functions.enqueue("a") == {"answers": [["a", False, PENDING]]}
    assert functions.enqueue("b", "a", content=b"other")["refused"]["code"] == "conflict"
    assert functions.server.hlen(functions.prefix + "id") == before


def test_lanes_take_turns(functions: Functions) -> None:
    functions.enqueue(*(f"a{n}" for n in range(4)), lane_key="ann")
    functions.enqueue(*(f"b{n}" for n in range(4)), lane_key="bob")
    assert [id for id, _ in functions.claim(1, total=6)] == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_limited_lane_hands_its_place_on(functions: Functions) -> None:
    functions.settings(lanes=[{"pattern": "ann", "limit": 1}])
    functions.enqueue("a", "b", lane_key="ann")
    assert functions.claim(1) == [("a", 1)]
    assert functions.claim(2) == []
    assert functions.finish("a", 1) == ["applied", COMPLETED]
    assert functions.claim(3) == [("b", 1)]
    assert functions.finish("b", 1) == ["applied", COMPLETED]
    assert not {key for key in functions.left() if key.startswith(("lane", "wait:", "hold:", "backlog"))}


def test_a_lane_that_gets_a_limit_counts_what_runs(functions: Functions) -> None:
    functions.enqueue("a", "b", lane_key="ann")
    functions.claim(1, total=1)
    functions.settings(lanes=[{"pattern": "ann", "limit": 1}])
    assert functions.claim(2) == []
    functions.settings(lanes=[])
    assert functions.claim(3) == [("b", 1)]


def test_a_retry_comes_back_when_it_is_due(functions: Functions) -> None:
    functions.enqueue("a")
    functions.claim(1)
    answer = functions.finish("a", 1, "retry", delay=5.0, reason="error", error="boom")
    assert answer == ["applied", SCHEDULED]
    assert functions.call("promote", "", "100")["promoted"] == 0
    functions.now += 5
    assert functions.call("promote", "", "100")["promoted"] == 1
    assert functions.claim(2) == [("a", 2)]


def test_the_jobs_of_a_session_that_died_are_taken_back(functions: Functions) -> None:
    functions.enqueue("a")
    functions.claim(1)
    functions.now += 16
    functions.register("v", host="there")
    rescued = functions.call("rescue", "", "100", "1")
    assert (rescued["declared"], rescued["retried"]) == (["w"], 1)
    assert functions.claim(1, session="v") == [("a", 2)]
    assert functions.finish("a", 1) == ["stale", RUNNING]


def test_a_sticky_key_stays_with_its_worker_until_it_is_released(functions: Functions) -> None:
    functions.register("v")
    functions.enqueue("a", "b", sticky="key")
    assert [functions.claim(1, session=who) for who in ("v", "w")] == [[], [("a", 1), ("b", 1)]]
    assert functions.call("release", "default", "key", "", "", "") == {"release": "draining"}
    functions.finish("a", 1)
    functions.finish("b", 1)
    assert functions.call("release", "default", "key", "", "", "") == {"release": "nothing"}


def test_a_broadcast_reaches_every_worker_and_then_is_over(functions: Functions) -> None:
    functions.register("v")
    functions.enqueue("a", kind="broadcast")
    assert functions.claim(1) == [("a/0", 1)]
    assert functions.claim(1, session="v") == [("a/1", 1)]
    functions.finish("a/0", 1)
    functions.finish("a/1", 1, "failed", session="v", reason="error", error="boom", group="error")
    assert functions.enqueue("a", kind="broadcast") == {"answers": [["a", False, COMPLETED]]}


def test_a_turn_starts_in_its_waiter_when_its_lane_is_free(functions: Functions) -> None:
    functions.settings(lanes=[{"pattern": "door", "limit": 1}])
    functions.enqueue("a", "b", kind="turn", lane_key="door", waiter="w")
    assert functions.enqueue("a", kind="turn", lane_key="door", waiter="w") == {"answers": [["a", False, RUNNING]]}
    assert functions.finish("a", 1) == ["applied", COMPLETED]
    assert functions.enqueue("b", kind="turn", lane_key="door", waiter="w") == {"answers": [["b", False, RUNNING]]}


def test_a_unique_value_is_held_until_its_job_is_over(functions: Functions) -> None:
    functions.enqueue("a", uniq="value")
    assert functions.enqueue("b", uniq="value") == {"answers": [["a", False, PENDING]]}
    functions.claim(1)
    functions.finish("a", 1)
    assert functions.enqueue("b", uniq="value") == {"answers": [["b", True, PENDING]]}


def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_is_asked(functions: Functions) -> None:
    functions.enqueue("a", "b")
    functions.claim(1, total=1)
    assert functions.call("cancel", encode(["a", "b"])) == {"states": [RUNNING, CANCELLED]}
    assert functions.call("renew", "w", encode([["a", 1]]), "1", "0")["cancel"] == ["a"]
    assert functions.call("cancel", encode(["a", "nobody"]))["refused"]["code"] == "not_found"


def test_one_leads_and_a_term_that_has_ended_is_refused(functions: Functions) -> None:
    assert functions.call("lead", "w", "10", "") == {"term": 1}
    assert functions.call("lead", "v", "10", "") == {"term": False}
    functions.now += 11
    assert functions.call("promote", "1", "100")["refused"]["code"] == "term_lost"
    assert functions.call("lead", "v", "10", "") == {"term": 2}


def test_what_retention_does_not_keep_leaves_nothing_but_its_id(functions: Functions) -> None:
    functions.enqueue("a", lane_key="ann")
    functions.claim(1)
    functions.finish("a", 1, result=6)
    functions.now += 60
    keep = {"completed_seconds": 10.0, "completed_count": 100, "failed_seconds": 10.0, "failed_count": 100}
    keep |= {"id_seconds": 3600.0, "history_seconds": 3600.0}
    assert functions.call("prune", "", "100", encode(keep))["jobs"] == 1
    left = {
        key for key in functions.left() if key.startswith(("by:", "ended:", "job", "live", "outcome", "result", "id"))
    }
    assert not left
    assert functions.enqueue("a", lane_key="ann") == {"answers": [["a", False, COMPLETED]]}
