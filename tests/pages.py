"""The pages of the documentation as the tests read them: examples, tables, commands, links and headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]

FENCED = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"\s*^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ((?:\w+/)*\w+\.py)\n")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
INLINE_COMMAND = re.compile(r"`(fairlane [^`]+)`")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(text: str) -> str:
    """A page without its code."""
    return FENCED.sub("", text)


@dataclass(frozen=True)
class Example:
    """A block of code; `printed` is the block of text right below it, None when there is none."""

    source: str
    line: int
    printed: str | None

    @property
    def file(self) -> str | None:
        """The name of the file that it is, when its first line names one."""
        found = FILE.match(self.source)
        return found and found[1]


def examples_of(text: str, language: str = "python") -> list[Example]:
    found = []
    for block in FENCED.finditer(text):
        if block[1].split()[:1] == [language]:
            assert block[1] == language, f"{block[1]!r}: every example runs"
            below = PRINTED.match(text, block.end())
            found.append(Example(block[2], text.count("\n", 0, block.start(2)), below and below[1]))
    return found


def anchors_of(text: str) -> set[str]:
    """What a link may name behind `#`: the headings, as GitHub spells them."""
    headings = HEADING.findall(prose_of(text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(prose_of(text_of(page))):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        goal = (page.parent / path).resolve() if path else page
        if not goal.exists() or (anchor and anchor not in anchors_of(text_of(goal))):
            yield target


def tables_under(text: str, heading: str) -> list[list[str]]:
    """The rows of all tables in a section, without their heads. A bar inside a cell is written with a backslash."""
    level = "#" * (len(heading) - len(heading.lstrip("#")))
    section = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, f"no section {heading!r}"
    rows = []
    for table in re.findall(r"(?:^\|.*\n)+", section[1], re.MULTILINE):
        for line in table.splitlines()[2:]:
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            rows.append([cell.strip().replace("\\|", "|") for cell in cells])
    return rows


def commands_of(text: str) -> list[list[str]]:
    """The words of every ``fairlane …`` on a page, in shell blocks and in prose. One with an ellipsis is no command."""
    lines = [line for block in examples_of(text, "sh") for line in block.source.splitlines()]
    lines += INLINE_COMMAND.findall(prose_of(text))
    return [command for line in lines if "…" not in line for command in _in_line(line)]


def _in_line(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    command: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("|&;<>"):
            # A number before a redirection is a descriptor.
            if "fairlane" in command:
                words = command[command.index("fairlane") + 1 :]
                yield words[:-1] if word.startswith(">") and words and words[-1] == "2" else words
            command = []
        else:
            command.append(word)
