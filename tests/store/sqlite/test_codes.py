"""States, gates and classes are written by name in SQL; `fairlane.store.codes` has their numbers."""

import re
from importlib.resources import files

import pytest

from fairlane.store.codes import with_codes
from fairlane.store.shared.queries import load_migrations, load_queries
from fairlane.store.sqlite.database import PACKAGE

CODED = r"\b(?:state|gate|class|move|kind)\b\)?"
BARE = re.compile(
    rf"{CODED}\s*(?:=|==|<>|!=|<=?|>=?|IS(?: NOT)?)\s*\d"
    rf"|{CODED}\s+(?:NOT\s+)?(?:IN\s*\(\s*|BETWEEN\s+)\d"
    rf"|\b(?:CASE\s+\S*(?:state|gate|class|move|kind)\b\S*(?:\s+\S*(?:state|gate)\))?\s+WHEN)\s+\d"
    rf"|\b(?:state|gate|class|move)\s+INTEGER[^,\n]*DEFAULT\s+\d",
    re.IGNORECASE,
)


def texts() -> dict[str, str]:
    """Every text of the SQLite store that can hold SQL."""
    package = files(PACKAGE)
    folders = (package, package.joinpath("sql"), package.joinpath("migrations"))
    found = [file for folder in folders for file in folder.iterdir() if file.name.endswith((".sql", ".py"))]
    return {file.name: file.read_text() for file in found}


def test_no_code_is_written_as_a_number() -> None:
    bare = [f"{name}: {match[0]}" for name, text in texts().items() for match in BARE.finditer(text)]
    assert not bare, "write STATE.PENDING, GATE.UNBOUND, CLASS.HIGH and so on: " + ", ".join(bare)


@pytest.mark.parametrize(
    "text",
    [
        "WHERE l.state = 2",
        "l.state >= 2",
        "gate IN (1, 2)",
        "state BETWEEN 4 AND 6",
        "CASE j.class WHEN 0 THEN 'high'",
        "CASE coalesce(o.state, l.state) WHEN 1 THEN",
        "gate       INTEGER NOT NULL DEFAULT 0",
        "if record.state == 3:",
    ],
)
def test_the_search_finds_bare_codes(text: str) -> None:
    assert BARE.search(text)


def test_loaded_texts_have_numbers_only() -> None:
    loaded = [*load_queries(PACKAGE).values(), *(migration.script for migration in load_migrations(PACKAGE))]
    assert not any(re.search(r"\b(?:STATE|GATE|MOVE|KIND|CLASS)\.[A-Z]", text) for text in loaded)
    assert with_codes("state = STATE.RUNNING AND gate > GATE.NONE") == "state = 3 AND gate > 0"
