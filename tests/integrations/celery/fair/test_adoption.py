"""What becomes of messages from the broker that cannot be stored, without workers."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from fairlane import Conflict, Fairlane, InvalidInput, StoreUnavailable
from fairlane.integrations.celery import Fair
from fairlane.integrations.celery.adoption import adopting


class Adopting:
    """A consumer that receives one message from the broker, and what happened to it."""

    def __init__(self, **fair: Any) -> None:
        app = Celery("adopting", broker="redis://", set_as_current=False)
        self.fair = Fair(app, Fairlane("sqlite:///never.db"), **fair)
        self.happened: list[str] = []

    def receive(self, **headers: Any) -> list[str]:
        """Receive it."""
        happened = self.happened
        timer = SimpleNamespace(call_after=lambda *_: happened.append("again"))
        receive = adopting(lambda *_, **__: happened.append("run by Celery"), self.fair, SimpleNamespace(timer=timer))
        message: Any = SimpleNamespace(
            headers={"id": "job-1", "task": "task", **headers},
            properties={},
            delivery_info={"exchange": "", "routing_key": "celery"},
            content_type="application/json",
            content_encoding="utf-8",
            body="[[], {}, {}]",
            payload=[[], {}, {}],
        )
        receive(message, None, lambda *_: happened.append("acknowledged"), None, None)
        return happened


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidInput("payload", "is too large"), "run by Celery"),
        (Conflict("too many jobs exist for this task id"), "run by Celery"),
        (StoreUnavailable("gone"), "again"),
        (ConnectionError("the result of a duplicate could not be written"), "again"),
    ],
)
def test_only_what_may_succeed_later_is_tried_again(
    error: Exception, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted = Adopting()

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(adopted.fair, "enqueue", refuse)
    assert adopted.receive() == [outcome]


def _unknown(*_: object) -> str:
    raise LookupError("no such customer")


@pytest.mark.parametrize(
    ("fair", "headers"),
    [
        ({"tenant": _unknown}, {}),
        ({"tenant": lambda *_: "x" * 1_000}, {}),
        ({}, {"eta": "soon"}),
        ({}, {"task": "a/b"}),
    ],
)
def test_what_cannot_become_a_job_is_run_by_celery(fair: dict[str, Any], headers: dict[str, Any]) -> None:
    assert Adopting(**fair).receive(**headers) == ["run by Celery"]
