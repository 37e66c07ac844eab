"""What becomes of messages from the broker that cannot be stored, without workers."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from fairlane import Conflict, Fairlane, InvalidInput, StoreUnavailable
from fairlane.integrations.celery import Fair
from fairlane.integrations.celery.adoption import adopting


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidInput("payload", "is too large"), "run by Celery"),
        (Conflict("too many jobs exist for this task id"), "run by Celery"),
        (StoreUnavailable("gone"), "again"),
    ],
)
def test_only_what_may_succeed_later_is_tried_again(
    error: Exception, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Celery("adopting", broker="redis://", set_as_current=False)
    fair = Fair(app, Fairlane("sqlite:///never.db"))
    happened: list[str] = []

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(fair, "enqueue", refuse)
    timer = SimpleNamespace(call_after=lambda *_: happened.append("again"))
    receive = adopting(lambda *_, **__: happened.append("run by Celery"), fair, SimpleNamespace(timer=timer))
    message: Any = SimpleNamespace(
        headers={"id": "job-1", "task": "task"},
        properties={},
        delivery_info={"exchange": "", "routing_key": "celery"},
        content_type="application/json",
        content_encoding="utf-8",
        body="[[], {}, {}]",
        payload=[[], {}, {}],
    )
    receive(message, None, lambda *_: happened.append("acknowledged"), None, None)
    assert happened == [outcome]
