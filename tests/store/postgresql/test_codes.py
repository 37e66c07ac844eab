"""States, gates, kinds, classes and moves are written by name in every SQL text of this store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fairlane.store import postgresql

FOLDER = Path(postgresql.__file__).parent
TEXTS = sorted([*FOLDER.glob("*/*.sql"), *FOLDER.glob("*.py")])
COLUMN = r"\b(?:\w+\.)?(?:[pv]_)?(?:state|gate|kind|class|move|was|becomes)s?(?:\[\w+\])?"
COMPARED = re.compile(
    COLUMN + r"\s*(?::=|=|<>|<=|>=|<|>|-|(?:NOT )?IN \(|= ANY \(ARRAY\[|IS (?:NOT )?DISTINCT FROM|BETWEEN)\s*\d",
    re.IGNORECASE,
)
CASES = re.compile(rf"CASE (?:coalesce\()?{COLUMN}[^;]*?\bWHEN \d", re.IGNORECASE)
CHOSEN = re.compile(r"(?:\b(?:v_|l\.)?state(?: smallint)? :=|RETURN) CASE\b[^;]*\b(?:THEN|ELSE) \d", re.IGNORECASE)
CAST = re.compile(r"\b(?:end_job|charge_run|take_back|record_attempt|apply|judge)\([^;]*\b\d+::smallint")


def without_comments(text: str) -> str:
    return re.sub(r"--[^\n]*", "", text)


def bare(text: str) -> list[str]:
    return [match[0] for pattern in (COMPARED, CASES, CHOSEN, CAST) for match in pattern.finditer(text)]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_codes_are_written_by_name(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".py":
        text = "\n".join(re.findall(r'"""(?s:.*?)"""', text))
    assert not bare(without_comments(text))


@pytest.mark.parametrize(
    "text",
    [
        "WHERE l.state = 3",
        "gate IN (1, 2)",
        "l.kind<>1",
        "p_becomes IS NOT DISTINCT FROM 4",
        "SET state = 3, due = NULL",
        "l.gate := 0;",
        "CASE j.class WHEN 0 THEN 'high' END",
        "v_state := CASE WHEN p_delay > 0 THEN 1 END;",
        "PERFORM fairlane.end_job(l, 6::smallint, 'by_user', m);",
    ],
)
def test_a_bare_code_is_found(text: str) -> None:
    assert bare(text)
