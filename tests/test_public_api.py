"""What `import fairlane` offers is a promise: it changes only together with this list."""

import inspect

import pytest

import fairlane

PUBLIC = [
    "Ask",
    "Backoff",
    "Binding",
    "BlockingClient",
    "BlockingHandle",
    "BroadcastHandle",
    "Busy",
    "Call",
    "Cancel",
    "Cancellation",
    "Claim",
    "Client",
    "Clock",
    "Conflict",
    "Events",
    "Fail",
    "Fairlane",
    "FairlaneError",
    "Handle",
    "IndexTaken",
    "Intervals",
    "InvalidInput",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobState",
    "LaneRule",
    "ManualClock",
    "NewJob",
    "NewSession",
    "NotFound",
    "NotSupported",
    "Position",
    "Priority",
    "QueueDeclaration",
    "QueueFull",
    "QueueOverride",
    "QueueSettings",
    "Reason",
    "Release",
    "Reserved",
    "Retry",
    "RunningJob",
    "RunningWorker",
    "SchemaMismatch",
    "SessionKind",
    "SessionLost",
    "Settings",
    "SettingsChange",
    "Slots",
    "Snooze",
    "Stale",
    "Store",
    "StoreError",
    "StoreFull",
    "StoreMissing",
    "StoreReadOnly",
    "StoreUnavailable",
    "SystemClock",
    "Task",
    "TermLost",
    "Turn",
    "Update",
    "Wakeups",
    "WouldDeadlock",
    "__version__",
    "current_job",
    "current_worker",
    "new_id",
    "open_store",
]


def test_all_is_exactly_the_promised_names() -> None:
    assert sorted(fairlane.__all__) == PUBLIC


def test_the_promise_is_written_in_order() -> None:
    assert sorted(PUBLIC) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_importable(name: str) -> None:
    assert hasattr(fairlane, name)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_class_and_function_has_a_docstring(name: str) -> None:
    value = getattr(fairlane, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        text = inspect.cleandoc(value.__doc__ or "")
        # A dataclass without one gets its own signature as its docstring.
        assert text, f"fairlane.{name} has no docstring"
        assert not text.startswith(f"{name}("), f"fairlane.{name} has no docstring of its own"
