"""Signing in: a browser sends its token once and gets a cookie that scripts cannot read.

The cookie holds the token: every instance of the service knows it, and it ends when the token is revoked. It is sent
to this service only, never by a page of another site, and it lasts an hour after the last visit of the dashboard.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ... import __version__
from .. import audit, view_shapes
from ..access import Caller, Scope, cookie_name
from ..answers import Answer, json_answer
from ..operation import Exchange, Operations
from ..problems import Problem

operations = Operations("session")
SECONDS = 3_600
SESSION = {
    "caller": "dashboard",
    "scopes": ["read"],
    "bound": False,
    "queues": None,
    "lane_prefix": None,
    "cookie": True,
    "version": __version__,
    "features": [],
}


class SignIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token, as `fairlane tokens new` printed it."""

    token: str


@operations.add(
    *("POST", "/session", Scope.PUBLIC),
    bound=True,
    body=SignIn,
    answer=view_shapes.SessionView,
    example={"token": "fl_…"},
    shows=SESSION,
)
async def sign_in(exchange: Exchange) -> Answer:
    """Sign in with a token: the response sets a cookie for the dashboard."""
    access = exchange.service.access
    secret = exchange.content.token.strip()
    caller = await access.signing_in(secret)
    if caller is None:
        audit.record(exchange, "sign_in refused")
        raise Problem(
            422, "is not valid, was revoked or has expired; create one with `fairlane tokens new`", field="token"
        )
    audit.record(exchange, "sign_in", token=caller.id)
    return json_answer(_view(exchange, caller, cookie=True), headers=[_cookie(exchange, secret, SECONDS)])


@operations.add("GET", "/session", Scope.PUBLIC, bound=True, answer=view_shapes.SessionView, shows=SESSION)
async def get_session(exchange: Exchange) -> Answer:
    """Whether the caller is signed in, and what it may do. It extends the cookie."""
    service = exchange.service
    if not service.access.fresh:
        await service.access.refresh()
    caller = service.access.caller(exchange.scope, exchange.headers, None)
    secret = service.access.cookie(exchange.headers)
    cookie = secret is not None and service.access.known(secret) is not None
    extended = [_cookie(exchange, secret, SECONDS)] if cookie and secret is not None else []
    return json_answer(_view(exchange, caller, cookie=cookie), headers=extended)


@operations.add(
    "DELETE", "/session", Scope.PUBLIC, bound=True, answer=view_shapes.SignedOut, shows={"signed_out": True}
)
async def sign_out(exchange: Exchange) -> Answer:
    """Sign out: the response removes the cookie."""
    return json_answer({"signed_out": True}, headers=[_cookie(exchange, "", 0)])


def _view(exchange: Exchange, caller: Caller, *, cookie: bool) -> dict[str, Any]:
    token = caller.token
    return {
        "caller": caller.id if token is None else token.name,
        "scopes": [scope.value for scope in Scope if scope is not Scope.PUBLIC and caller.may(scope)],
        "bound": caller.bound,
        "queues": None if token is None else token.queues,
        "lane_prefix": caller.lane_prefix,
        "cookie": cookie,
        "version": __version__,
        "features": exchange.service.features,
    }


def _cookie(exchange: Exchange, value: str, seconds: int) -> tuple[bytes, bytes]:
    path = str(exchange.scope.get("root_path", "")).rstrip("/") + "/"
    # A proxy that ends TLS sends this header. A client that forges it only loses its own cookie.
    secure = "; Secure" if "https" in (exchange.scope.get("scheme"), exchange.header("x-forwarded-proto")) else ""
    text = f"{cookie_name(exchange.headers)}={value}; Path={path}; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"
    return (b"set-cookie", text.encode("latin-1"))
