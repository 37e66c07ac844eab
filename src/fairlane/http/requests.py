"""Request bodies and their conversion to calls. Everything is validated here, before anything is stored."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..errors import InvalidInput
from ..model.retry import Backoff
from ..task import Call
from .access import Caller
from .problems import Problem
from .service import Service

KEY_LENGTH = 255
_NAMED = re.compile(r"'(\w+)'")
_NO_PATH = re.compile(r"(?:.*/)?\.\.?|.*/(?:result|events|copies|cancel|retry)", re.DOTALL)
"""Ids whose path would be that of something else."""


class JobOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a job. The task supplies what is left out. Durations are in seconds."""

    queue: str | UnsetType = UNSET
    lane: str | UnsetType | None = UNSET
    priority: Literal["high", "normal", "low"] | UnsetType = UNSET
    cost: float | UnsetType = UNSET
    delay: float | UnsetType = UNSET
    run_at: float | UnsetType = UNSET
    """Seconds since 1970."""
    expires: float | UnsetType | None = UNSET
    retries: int | UnsetType = UNSET
    backoff: Backoff | UnsetType = UNSET
    timeout: float | UnsetType | None = UNSET
    unique: str | UnsetType | None = UNSET
    unique_for: float | UnsetType | None = UNSET
    pool: str | UnsetType = UNSET
    sticky: str | UnsetType | None = UNSET
    worker: int | UnsetType | None = UNSET
    id: str | UnsetType = UNSET
    """Sending the same id again creates no second job."""

    def given(self) -> dict[str, Any]:
        """The options that were sent."""
        return {f: value for f in self.__struct_fields__ if (value := getattr(self, f)) is not UNSET}


class JobRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task to run, with its arguments."""

    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    options: JobOptions | None = None

    def call(self, service: Service, caller: Caller, id: str | None = None) -> Call[Any]:
        """Build the call, validated against the function's signature and the caller's bounds."""
        task = service.task(self.task)
        given = {} if self.options is None else self.options.given()
        if id is not None:
            if "id" in given:
                raise Problem(422, "cannot be combined with an Idempotency-Key", field="options.id")
            given["id"] = id
        try:
            call = (task.options(**given) if given else task).call(*self.args, **self.kwargs)
        except InvalidInput as exc:
            raise Problem(422, exc.problem, field=f"options.{exc.field}" if exc.field in given else exc.field) from None
        except TypeError as exc:
            named = _NAMED.search(str(exc))
            raise Problem(422, str(exc), field=f"argument {named[0]}" if named else "args") from None
        if "id" in given and _NO_PATH.fullmatch(call.job.id):
            raise Problem(422, "must not end in a part of a path, such as /result or ..", field="options.id")
        if caller.bound:
            caller.check_new(call.job)
        return call


def idempotent_id(caller: Caller, key: str | None, number: int | None = None) -> str | None:
    """Derive the job id from an Idempotency-Key. Each token has key space of its own."""
    if key is None:
        return None
    if not key or len(key) > KEY_LENGTH:
        raise Problem(422, f"must have 1 to {KEY_LENGTH} characters", field="Idempotency-Key")
    parts = f"{caller.id}\0{key}" if number is None else f"{caller.id}\0{key}\0{number}"
    return f"key-{hashlib.sha256(parts.encode()).hexdigest()[:32]}"
