"""The page on the HTTP service has every route, as it is."""

from __future__ import annotations

from fairlane import Fairlane
from fairlane.http import create_app
from tests.pages import DOCS, tables_under, text_of


def test_the_page_has_every_route_with_its_scope_and_no_other() -> None:
    operations = create_app(Fairlane("sqlite:///never-opened.db")).state.operations
    known = [[f"`{o.method} {o.path.replace(':path}', '}')}`", o.scope.value] for o in operations]
    page = [row[:2] for row in tables_under(text_of(DOCS / "http.md"), "## Every route")]
    assert sorted(page) == sorted(known)
