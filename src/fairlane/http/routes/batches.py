"""Many jobs in one request: an array that is stored atomically, or a stream of lines with a response to each."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from starlette.types import Receive, Send
from starlette.types import Scope as Connection

from ...errors import Busy, Conflict, FairlaneError, InvalidInput, QueueFull
from ...model.job import MOST_BYTES_PER_CALL, NewJob
from ...task import Call
from .. import shapes
from ..access import Scope
from ..answers import NDJSON, Parts, json_answer
from ..bodies import check_json, check_nesting, chunks, decoded, media_type, read_body
from ..operation import Exchange, Operations, Response
from ..problems import Problem, problem_of
from ..requests import JobRequest, idempotent_id
from .jobs import KEY, REQUEST, SENT, check_own

operations = Operations("jobs")
_one = msgspec.json.Decoder(JobRequest)
_many = msgspec.json.Decoder(list[msgspec.Raw])
_encoder = msgspec.json.Encoder()


@operations.add(
    *("POST", "/jobs:batch", Scope.ENQUEUE),
    bound=True,
    timed=False,
    body=list[JobRequest],
    streams_in=True,
    answer=shapes.SentMany,
    status=202,
    also={200: "For NDJSON: a line for each job with `line`, and with `id`, `created` and `state` or with `problem`."},
    headers=KEY,
    example=[REQUEST],
    shows={"jobs": [SENT]},
    other_bodies={"application/x-ndjson": '{"task":"shop.render","args":["ann"]}\\n'},
)
async def send_batch(exchange: Exchange) -> Response:
    """Send many jobs.

    An array of up to 1,000 jobs is stored as a whole or not at all. With `Content-Type: application/x-ndjson` the body
    has one job per line, without a limit, and the response has a line for each as soon as it is stored or rejected.
    """
    if media_type(exchange.headers) in ("application/x-ndjson", "application/jsonl"):
        return _Lines(exchange)
    check_json(exchange.headers)
    settings = exchange.service.settings
    raw = await read_body(exchange.receive, exchange.headers, settings.batch_bytes, settings.body_seconds)
    parts = _many.decode(raw)
    if len(parts) > settings.batch_jobs:
        raise Problem(
            422, f"{len(parts)} jobs exceed the limit of {settings.batch_jobs} per batch; send them as NDJSON"
        )
    calls: list[Call[Any]] = []
    for number, part in enumerate(parts):
        try:
            calls.append(_call(exchange, bytes(part), number))
        except Exception as exc:
            raise _at(number, exc) from None
    if not calls:
        return json_answer({"jobs": []}, 202)
    answers = await exchange.service.timed(exchange.client.send([call.job for call in calls]))
    if exchange.caller.bound:
        for number, (call, answer) in enumerate(zip(calls, answers, strict=True)):
            try:
                await exchange.service.timed(check_own(exchange, call.job.id, answer.id))
            except Problem as exc:
                raise _at(number, exc) from None
    return json_answer({"jobs": answers}, 202)


def _call(exchange: Exchange, raw: bytes, number: int) -> Call[Any]:
    check_nesting(raw, exchange.service.settings.nesting)
    id = idempotent_id(exchange.caller, exchange.header("idempotency-key"), number)
    return decoded(_one, raw).call(exchange.service, exchange.caller, id)


def _at(number: int, exc: Exception) -> Exception:
    """The problem of one job of a batch, with its index in the field."""
    problem = problem_of(exc)
    if problem is None:
        return exc
    field = f"[{number}]" if problem.field is None else f"[{number}].{problem.field}"
    return Problem(problem.status, problem.detail, field=field, retry_after=problem.retry_after)


class _Lines:
    """Reads lines, stores them in parts, and responds to each with a line."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._settings = exchange.service.settings

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        with self._exchange.service.stream(self._exchange.caller):
            parts = Parts(scope, send, self._settings.slow_reader)
            await parts.begin(NDJSON)
            try:
                async for answers in self._answers():
                    await parts.write(b"".join(_encoder.encode(answer) + b"\n" for answer in answers))
            except Problem as problem:
                await parts.write(_encoder.encode({"line": None, "problem": problem.document()}) + b"\n")
            await parts.end()

    async def _answers(self) -> AsyncIterator[list[dict[str, Any]]]:
        number = 0
        async for lines in self._parts():
            found: list[dict[str, Any]] = []
            calls: list[tuple[dict[str, Any], NewJob]] = []
            for line in lines:
                number += 1
                answer: dict[str, Any] = {"line": number}
                found.append(answer)
                try:
                    calls.append((answer, _call(self._exchange, line, number).job))
                except Exception as exc:
                    answer["problem"] = _document(exc)
            for part in _within(calls):
                await self._store(part)
            yield found

    async def _store(self, part: list[tuple[dict[str, Any], NewJob]]) -> None:
        try:
            answers = await self._exchange.service.timed(self._exchange.client.send([job for _, job in part]))
        except (Conflict, InvalidInput, QueueFull, Busy) as exc:
            if len(part) == 1:
                part[0][0]["problem"] = _document(exc)
                return
            # One of them was rejected: send each alone, so that the others are stored.
            for one in part:
                await self._store([one])
        except (FairlaneError, TimeoutError) as exc:
            for answer, _ in part:
                answer["problem"] = _document(exc)
        else:
            for (answer, job), sent in zip(part, answers, strict=True):
                if self._exchange.caller.bound:
                    try:
                        await self._exchange.service.timed(check_own(self._exchange, job.id, sent.id))
                    except (Problem, FairlaneError, TimeoutError) as exc:
                        answer["problem"] = _document(exc)
                        continue
                answer |= {"id": sent.id, "created": sent.created, "state": sent.state.value}

    async def _parts(self) -> AsyncIterator[list[bytes]]:
        """Yield lines as they arrive, each within the size and the time limit of a body."""
        most, seconds, rest = self._settings.body_bytes, self._settings.body_seconds, b""
        began = time.monotonic()
        async for chunk in chunks(self._exchange.receive, seconds):
            *lines, rest = (rest + chunk).split(b"\n")
            if lines:
                began = time.monotonic()
            elif time.monotonic() - began > seconds:
                raise Problem(408, f"a line took longer than {seconds:g} s to arrive")
            if len(rest) > most or any(len(line) > most for line in lines):
                raise Problem(413, f"a line is larger than {most} bytes")
            lines = [line for line in lines if line.strip()]
            for start in range(0, len(lines), self._settings.batch_jobs):
                yield lines[start : start + self._settings.batch_jobs]
        if rest.strip():
            yield [rest]


def _within(calls: list[tuple[dict[str, Any], NewJob]]) -> Iterator[list[tuple[dict[str, Any], NewJob]]]:
    """Split jobs into parts that fit one call of the store."""
    part: list[tuple[dict[str, Any], NewJob]] = []
    size = 0
    for each in calls:
        if part and size + each[1].size > MOST_BYTES_PER_CALL:
            yield part
            part, size = [], 0
        part.append(each)
        size += each[1].size
    if part:
        yield part


def _document(exc: Exception) -> dict[str, Any]:
    problem = problem_of(exc)
    if problem is None:
        raise exc
    return problem.document()
