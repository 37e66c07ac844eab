"""The files of the dashboard. They are built from ``dashboard/`` in the repository and are part of the package.

The pages contain no data: they read it from the API, with the rights of their visitor. Everything comes from
this service, and the browser is told to load nothing else and to run no script inside a page.
"""

from __future__ import annotations

import gzip
from functools import lru_cache
from importlib.resources import files

import msgspec
from starlette.types import Receive, Scope, Send

FOLDER = "dashboard"
TYPES = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
FOREVER = b"public, max-age=31536000, immutable"
"""For files whose names contain a hash of their content."""
ALWAYS_ASK = b"no-cache"


class PageFile(msgspec.Struct, frozen=True):
    """A file with its compressed form."""

    body: bytes
    packed: bytes
    content_type: bytes


@lru_cache(maxsize=1)
def page_files() -> dict[str, PageFile]:
    """Every file by its path from the root of the service; ``index.html`` is the page itself."""
    folder = files("fairlane.http").joinpath(FOLDER)
    found: dict[str, PageFile] = {}
    for part, prefix in ((folder, ""), (folder.joinpath("assets"), "assets/")):
        for each in part.iterdir() if part.is_dir() else ():
            kind = TYPES.get(each.name.rpartition(".")[2])
            if kind is not None and each.is_file():
                body = each.read_bytes()
                found[prefix + each.name] = PageFile(body, gzip.compress(body, mtime=0), kind)
    return found


class PageAnswer:
    """A file as a response."""

    def __init__(self, file: PageFile, *, changes: bool) -> None:
        self._file = file
        self._changes = changes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted = dict(scope["headers"]).get(b"accept-encoding", b"")
        packed = b"gzip" in accepted
        body = self._file.packed if packed else self._file.body
        headers = [
            *SECURITY,
            (b"content-type", self._file.content_type),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", ALWAYS_ASK if self._changes else FOREVER),
            (b"vary", b"accept-encoding"),
            *([(b"content-encoding", b"gzip")] if packed else []),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
