"""Fairlane: a task queue for Python in which nobody blocks anybody else.

A program starts with `Fairlane`, the application object: it declares tasks and queues, sends jobs and reads them. Below
it is the engine: the `Store` port and `open_store`. `fairlane.model` has the records that both exchange.
"""

import sys as _sys
import typing as _typing

from .app import Fairlane
from .blocking import BlockingClient, BlockingHandle
from .client import Client
from .config import Settings
from .errors import (
    Busy,
    Cancel,
    Conflict,
    Fail,
    FairlaneError,
    IndexTaken,
    InvalidInput,
    JobCancelled,
    JobFailed,
    NotFound,
    NotSupported,
    QueueFull,
    Retry,
    SchemaMismatch,
    SessionLost,
    Snooze,
    Stale,
    StoreError,
    StoreFull,
    StoreMissing,
    StoreReadOnly,
    StoreUnavailable,
    TermLost,
    WouldDeadlock,
)
from .events import Events
from .handle import BroadcastHandle, Cancellation, Handle, Position, Update
from .hooks import RunningWorker, current_worker
from .model import foreign_words as _foreign_words
from .model.binding import Binding, Release
from .model.declaration import QueueDeclaration
from .model.ids import new_id
from .model.intervals import Intervals
from .model.job import Job, JobState, NewJob, Priority, Reason
from .model.retry import Backoff
from .model.session import Claim, NewSession, SessionKind
from .model.settings import LaneRule, QueueOverride, QueueSettings, SettingsChange
from .model.slots import Ask, Reserved, Slots
from .runtime.running_job import RunningJob, current_job
from .store import open_store
from .store.clock import Clock, ManualClock, SystemClock
from .store.port import Store
from .store.wakeups import Wakeups
from .task import Call, Task
from .turn import Turn

__version__ = "0.1.0.dev0"

__all__ = [
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

if not _typing.TYPE_CHECKING:
    # Hidden from type checkers, so that they report unknown names.
    def __getattr__(name: str) -> object:
        # `from fairlane import …` asks from a frame of the import system, and needs another error than an attribute.
        importer = _sys._getframe(1).f_globals.get("__name__")
        imported = importer in ("importlib._bootstrap", "_frozen_importlib")
        raise _foreign_words.no_name(_sys.modules[__name__], __name__, name, imported=imported)
