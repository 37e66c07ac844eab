"""Clients of an HTTP service, with the same methods as the client inside the service's process.

    async with AsyncClient("http://127.0.0.1:8000", token) as client:
        handle = await client.enqueue(render, "ann", "a cat")     # Handle[str]: the task's own types
        handle = await client.enqueue("shop.render", "ann", "a cat")  # by name: Handle[Any]
        print(await handle.result(timeout=60))

`Client` is the same for code without an event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import httpx
import msgspec

from ..blocking import BlockingHandle
from ..errors import InvalidInput
from ..handle import Handle
from ..model import codec
from ..model.ids import new_id
from ..model.job import MOST_BYTES_PER_ENQUEUE, Priority, parts_of
from ..model.names import instant
from ..runtime.loop_thread import LoopThread
from ..task import Call, OneCall, Task
from .remote_handle import RemoteHandle, Submitted, read
from .transport import AccessDenied, Transport

__all__ = ["AccessDenied", "AsyncClient", "Client"]

P = ParamSpec("P")
R = TypeVar("R")
TIMEOUT = 10.0
PATIENCE = 5.0


class _Accepted(msgspec.Struct, frozen=True):
    jobs: list[Submitted]


class AsyncClient:
    """Sends jobs to an HTTP service and reads their state.

    `timeout` limits one request. A request without a response is repeated for `patience` seconds, with the same
    ``Idempotency-Key``, before `StoreUnavailable` is raised.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._transport = Transport(url, token, timeout=timeout, patience=patience, transport=transport)

    @overload
    async def enqueue(self, what: Call[R], /) -> Handle[R]: ...
    @overload
    async def enqueue(self, what: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]: ...
    @overload
    async def enqueue(self, what: str, /, *args: Any, **kwargs: Any) -> Handle[Any]: ...
    async def enqueue(self, what: Any, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Send a job: a call, a task with its arguments, or a task's name with its arguments.

        Set options with `task.options(…)`; to set them for a name, use `send`.
        """
        if isinstance(what, str):
            return await self.send(what, args, kwargs)
        call = what.call(*args, **kwargs) if isinstance(what, Task) else what
        if not isinstance(call, Call):
            got = type(call).__name__
            raise InvalidInput("task", f"must be a task, its name, or a call such as render.call('ann'), not a {got}")
        # An id that was generated here is unknown to the user, so it serves as the key and the service derives the id.
        named = isinstance(what, Call) or "id" in call.task.chosen
        answer = await self._post(body_of(call, named=named), None if named else call.job.id)
        return RemoteHandle(self._transport, answer.id, call.task.read_result, answer.created)

    async def send(
        self,
        task: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[OneCall],
    ) -> Handle[Any]:
        """Send a job of a task that is known only by name. The service validates its arguments."""
        given: dict[str, Any] = {**options}
        body = {"task": task, "args": list(args), "kwargs": dict(kwargs or {}), "options": plain(given)}
        answer = await self._post(body, None if "id" in given else new_id())
        return RemoteHandle(self._transport, answer.id, read_anything, answer.created)

    async def _post(self, body: dict[str, Any], key: str | None) -> Submitted:
        """Send a job. Its id or the key makes repeated requests create it once."""
        content = codec.encode("arguments", body, MOST_BYTES_PER_ENQUEUE)
        return read((await self._transport.post("/jobs", content, key=key)).content, Submitted)

    async def enqueue_many(self, calls: Sequence[Call[R]]) -> list[Handle[R]]:
        """Send any number of jobs in order, 1,000 at a time. After an error the same list may be sent again."""
        handles: list[Handle[R]] = []
        for part in parts_of(calls, lambda call: call.job.size, most_bytes=MOST_BYTES_PER_ENQUEUE // 2):
            body = msgspec.json.encode([body_of(call, named=True) for call in part])
            answers = read((await self._transport.post("/jobs:batch", body)).content, _Accepted).jobs
            handles += [
                RemoteHandle(self._transport, answer.id, call.task.read_result, answer.created)
                for call, answer in zip(part, answers, strict=True)
            ]
        return handles

    @overload
    def handle(self, id: str) -> Handle[Any]: ...
    @overload
    def handle(self, id: str, task: Task[..., R]) -> Handle[R]: ...
    def handle(self, id: str, task: Task[..., Any] | None = None) -> Handle[Any]:
        """The handle of an existing job. With its task, the result is decoded as the task's type."""
        reader = read_anything if task is None else task.read_result
        return RemoteHandle(self._transport, id, reader, created=False)

    async def close(self) -> None:
        """Close the connections to the service."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._transport.shown}>"


class Client:
    """`AsyncClient` for code without an event loop, with the same methods."""

    def __init__(
        self, url: str, token: str | None = None, *, timeout: float = TIMEOUT, patience: float = PATIENCE
    ) -> None:
        self._thread = LoopThread()
        self._client = AsyncClient(url, token, timeout=timeout, patience=patience)

    @overload
    def enqueue(self, what: Call[R], /) -> BlockingHandle[R]: ...
    @overload
    def enqueue(self, what: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> BlockingHandle[R]: ...
    @overload
    def enqueue(self, what: str, /, *args: Any, **kwargs: Any) -> BlockingHandle[Any]: ...
    def enqueue(self, what: Any, /, *args: Any, **kwargs: Any) -> BlockingHandle[Any]:
        """Send a job."""
        return self._blocking(lambda: self._client.enqueue(what, *args, **kwargs))

    def send(
        self,
        task: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[OneCall],
    ) -> BlockingHandle[Any]:
        """Send a job of a task that is known only by name."""
        return self._blocking(lambda: self._client.send(task, args, kwargs, **options))

    def enqueue_many(self, calls: Sequence[Call[R]]) -> list[BlockingHandle[R]]:
        """Send any number of jobs."""
        handles = self._thread.run(lambda: self._client.enqueue_many(calls))
        return [BlockingHandle(self._thread, handle) for handle in handles]

    @overload
    def handle(self, id: str) -> BlockingHandle[Any]: ...
    @overload
    def handle(self, id: str, task: Task[..., R]) -> BlockingHandle[R]: ...
    def handle(self, id: str, task: Task[..., Any] | None = None) -> BlockingHandle[Any]:
        """The handle of an existing job."""
        found = self._client.handle(id) if task is None else self._client.handle(id, task)
        return BlockingHandle(self._thread, found)

    def close(self) -> None:
        """Close the connections and stop the thread."""
        self._thread.run(self._client.close)
        self._thread.stop()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._client._transport.shown}>"

    def _blocking(self, work: Callable[[], Awaitable[Handle[R]]]) -> BlockingHandle[R]:
        return BlockingHandle(self._thread, self._thread.run(work))


def body_of(call: Call[Any], *, named: bool) -> dict[str, Any]:
    """Encode a call for the service, with only those options that were set explicitly.

    With `named` the job keeps the call's own id.
    """
    args, kwargs = codec.decode_call(call.job.payload)
    given = {name: getattr(call.job, name) for name in call.task.chosen - {"id"}}
    if given.get("run_at", 0) is None:
        del given["run_at"]
    if named:
        given["id"] = call.job.id
    return {"task": call.job.task, "args": args, "kwargs": kwargs, "options": plain(given)}


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options to JSON values."""
    return {name: _plain(name, value) for name, value in options.items()}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Priority):
        return value.label
    if isinstance(value, timedelta):
        return value.total_seconds()
    return instant(name, value)


_anything: codec.Reader[Any] = codec.Reader("result", Any)


def read_anything(raw: bytes | None) -> Any:
    """Decode the result of a task that is known only by name."""
    return _anything.read(raw or b"null")
