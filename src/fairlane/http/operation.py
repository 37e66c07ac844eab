"""Operations: a method and a path, the required scope, and the types of request and response.

The table of operations is the only source: routes, access checks and the OpenAPI document are derived from it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Send
from starlette.types import Scope as Connection

from ..client import Client
from ..errors import InvalidInput
from .access import Caller, Scope, check_host, check_origin
from .answers import Disconnected
from .bodies import read_json
from .problems import Problem, invalid_value, problem_of

if TYPE_CHECKING:
    from .service import Service

T = TypeVar("T")
logger = logging.getLogger("fairlane.http")
EVENT_STREAM = "text/event-stream"


class Response(Protocol):
    """A response as an ASGI application."""

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None: ...


Handler = Callable[["Exchange"], Awaitable[Response]]
Declare = Callable[[Handler], Handler]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path."""

    method: str
    path: str
    scope: Scope
    handler: Handler
    name: str
    summary: str
    tag: str
    bound: bool = False
    """Whether tokens that are bound to queues or lanes may call it. If so, it checks these bounds itself."""
    timed: bool = True
    """Whether the store's deadline applies to the whole operation. Streams and long polls have their own deadlines."""
    query: type[msgspec.Struct] | None = None
    body: Any = None
    body_optional: bool = False
    streams_in: bool = False
    """Whether it reads its body itself."""
    answer: Any = None
    lane_answer: Any = None
    """The type of the answer to a token that is bound to lanes, if it is another."""
    status: int = 200
    content: str = "application/json"
    other_bodies: Mapping[str, Any] = {}
    """Other content types of the request body, with an example of each."""
    headers: Mapping[str, str] = {}
    """Request headers that it reads, with their descriptions."""
    also: Mapping[int, str] = {}
    """Other successful status codes, with their descriptions."""
    example: Any = None
    """An example of the request body."""
    shows: Any = None
    """An example of the response."""
    parameters: Mapping[str, Any] = {}
    """Examples of parameters by name."""

    @property
    def changes(self) -> bool:
        """Whether it changes what is stored, whatever its method is."""
        return self.scope not in (Scope.PUBLIC, Scope.READ)


class Operations:
    """Operations of one subject, in the order in which their paths are matched."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.all: list[Operation] = []

    def add(self, method: str, path: str, scope: Scope, **rest: Any) -> Declare:
        """Declare a coroutine function as an operation. The first line of its docstring is the summary."""

        def declare(handler: Handler) -> Handler:
            name = str(handler.__name__)
            summary = (handler.__doc__ or "").partition("\n")[0].rstrip(".")
            self.all.append(
                Operation(
                    method=method,
                    path=path,
                    scope=scope,
                    handler=handler,
                    name=name,
                    summary=summary,
                    tag=self.tag,
                    **rest,
                )
            )
            return handler

        return declare


class Exchange:
    """A request while it is handled."""

    __slots__ = ("caller", "content", "headers", "operation", "receive", "scope", "service")

    def __init__(
        self,
        service: Service,
        operation: Operation,
        scope: Connection,
        receive: Receive,
        headers: dict[bytes, bytes],
        caller: Caller,
    ) -> None:
        self.service = service
        self.operation = operation
        self.scope = scope
        self.receive = receive
        self.headers = headers
        self.caller = caller
        self.content: Any = None
        """The decoded body, if the operation has a type for it."""

    @property
    def client(self) -> Client:
        """The client of the application."""
        return self.service.app.client

    def path(self, name: str) -> str:
        """A parameter of the path."""
        return str(self.scope["path_params"][name])

    def header(self, name: str) -> str | None:
        """A header as text."""
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    def query(self, type_: type[T]) -> T:
        """Decode the query into a struct. Unknown and repeated names are rejected."""
        given: dict[str, str] = {}
        for name, value in _pairs(self.scope.get("query_string", b"")):
            if name in given:
                raise Problem(422, "is repeated", field=name)
            given[name] = value
        known = {field.encode_name for field in msgspec.structs.fields(type_)}  # type: ignore[arg-type]  # a struct
        for name in given:
            if name not in known:
                raise Problem(422, f"is not a parameter of this path (known: {', '.join(sorted(known))})", field=name)
        try:
            return msgspec.convert(given, type_, strict=False)
        except msgspec.ValidationError as exc:
            raise invalid_value(exc, type_) from None

    def url(self, path: str) -> str:
        """The path of another operation, as the client sees it."""
        return str(self.scope.get("root_path", "")) + self.service.prefix + path


def _pairs(query: bytes) -> Sequence[tuple[str, str]]:
    from urllib.parse import parse_qsl

    try:
        return parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(query),
            max_num_fields=64,
            errors="strict",
        )
    except ValueError:
        raise Problem(400, "the query string is malformed") from None


class Endpoint:
    """All operations of one path, as an ASGI application."""

    def __init__(self, service: Service, operations: Sequence[Operation]) -> None:
        self.operations = {operation.method: operation for operation in operations}
        self._service = service
        self._decoders = {
            operation.method: msgspec.json.Decoder(operation.body)
            for operation in operations
            if operation.body is not None and not operation.streams_in
        }
        allowed = {*self.operations, *(["HEAD"] if self._operation("HEAD") else [])}
        self._allow = ", ".join(sorted(allowed)).encode()

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        service = self._service
        started = False

        async def sending(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            response = await self._answer(service, scope, receive)
            await response(scope, receive, sending)
        except Disconnected:
            return
        except Exception as exc:
            problem = problem_of(exc)
            if problem is None:
                logger.exception("%s %s failed", scope["method"], self.path_of(scope))
                problem = Problem(500, "internal error; see the log of the service")
            if started:
                # The status was already sent: close the connection, so that the client notices the incomplete body.
                raise
            await problem.answer()(scope, receive, send)

    def _operation(self, method: str) -> Operation | None:
        """The operation of a method. HEAD is a GET whose body the server leaves out, as load balancers send it."""
        if method != "HEAD":
            return self.operations.get(method)
        operation = self.operations.get("GET")
        return None if operation is None or operation.changes or operation.content == EVENT_STREAM else operation

    def path_of(self, scope: Connection) -> str:
        """The declared path, which contains no input of the client."""
        operation = self._operation(scope["method"]) or next(iter(self.operations.values()))
        return operation.path

    async def _answer(self, service: Service, scope: Connection, receive: Receive) -> Response:
        settings = service.settings
        pairs = scope["headers"]
        if sum(map(len, (part for pair in pairs for part in pair))) > settings.header_bytes:
            raise Problem(431, f"the headers are larger than {settings.header_bytes} bytes in total")
        if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > settings.header_bytes // 2:
            raise Problem(414, f"path and query are longer than {settings.header_bytes // 2} bytes")
        headers = dict(pairs)
        check_host(settings, headers)
        operation = self._operation(scope["method"])
        check_origin(settings, headers, changes=operation is not None and operation.changes)
        if operation is None:
            raise Problem(405, "this path does not support this method", headers=((b"allow", self._allow),))
        if operation.scope is not Scope.PUBLIC and not service.access.fresh:
            await service.timed(service.access.refresh())
        caller = service.access.caller(scope, headers, operation.scope)
        if caller.bound and not operation.bound:
            raise Problem(403, "this token is bound to queues or lanes and may not use operations of the whole system")
        exchange = Exchange(service, operation, scope, receive, headers, caller)
        decoder = self._decoders.get(operation.method)
        if decoder is not None:
            # Read the body before the store's deadline starts: a client may be slow.
            exchange.content = await read_json(decoder, receive, headers, settings)
        try:
            if operation.timed:
                return await service.timed(operation.handler(exchange))
            return await operation.handler(exchange)
        finally:
            if operation.scope in (Scope.OPERATE, Scope.ADMIN):
                # The caller has changed something, and expects to see it in what it reads next.
                service.shared.forget()
                service.diagnosis.forget()


def check_id(value: str) -> str:
    """Validate the id of a job in a path."""
    from ..model.names import check_key

    try:
        return check_key("id", value)
    except InvalidInput as exc:
        raise Problem(404, f"no such job: {exc.problem}", field="id") from None
