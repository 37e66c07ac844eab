"""`docs/states.md` is correct: its diagram is the table of moves, and no state, move or reason is missing."""

import re
from pathlib import Path

from fairlane.model.job import CANCELLED_REASONS, FINAL_STATES, JobState, Reason
from fairlane.model.states import MOVES, Move

PAGE = Path(__file__).resolve().parents[2] / "docs" / "states.md"


def drawing() -> str:
    """The mermaid block for `MOVES`: one arrow for each pair of states, with the words of all moves along it."""
    lines = ["```mermaid", "stateDiagram-v2"]
    for source in (None, *JobState):
        for target in JobState:
            words = [move.value for move in Move if source in MOVES[move][0] and target in MOVES[move][1]]
            if words:
                lines.append(f"    {source or '[*]'} --> {target}: {', '.join(words)}")
    lines += [f"    {state} --> [*]" for state in JobState if state in FINAL_STATES]
    return "\n".join([*lines, "```"])


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The rows of the first table after a heading, without its own head."""
    _, _, rest = page().partition(f"# {heading}\n")
    table = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert table, f"no table under {heading}"
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def test_the_drawing_on_the_page_is_made_from_the_moves() -> None:
    found = re.findall(r"```mermaid\n.*?```", page(), re.DOTALL)
    assert found == [drawing()], f"put this into {PAGE.name}:\n{drawing()}"


def test_every_state_is_explained_and_the_final_ones_are_called_so() -> None:
    explained = dict(rows("States of a job"))
    assert list(explained) == [state.value for state in JobState]
    assert {name for name, words in explained.items() if "(final)" in words} == FINAL_STATES


def test_every_move_has_a_paragraph_of_its_own() -> None:
    assert re.findall(r"^### (\w+)\n\n\S", page(), re.MULTILINE) == [move.value for move in Move]


def test_every_reason_is_explained_beside_the_state_it_belongs_to() -> None:
    explained = [(reason, state) for reason, state, because in rows("The reasons") if because]
    assert explained == [(reason.value, "cancelled" if reason in CANCELLED_REASONS else "failed") for reason in Reason]
