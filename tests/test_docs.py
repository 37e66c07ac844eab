"""The pages tell the truth: their examples run and print what stands below them, their links lead somewhere, and the
reference of the store is the port as it is.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import pytest

from fairlane import errors
from fairlane.job import Acceptance
from fairlane.store import Store

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
MIGRATIONS = ROOT / "src" / "fairlane" / "backends" / "sqlite" / "migrations"

FENCED = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"\s*^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(text: str) -> str:
    """A page without its code."""
    return FENCED.sub("", text)


@dataclass(frozen=True)
class Example:
    """A block of Python; `printed` is the block of text right below it, None when there is none."""

    source: str
    line: int
    printed: str | None


def examples_of(text: str) -> list[Example]:
    found = []
    for block in FENCED.finditer(text):
        if block[1].split()[:1] == ["python"]:
            assert block[1] == "python", f"{block[1]!r}: every example runs"
            below = PRINTED.match(text, block.end())
            found.append(Example(block[2], text.count("\n", 0, block.start(2)), below and below[1]))
    return found


def run(text: str, name: str) -> None:
    """Run the examples of a page one after the other, as one module in which `await` may stand anywhere."""
    module: dict[str, object] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for example in examples_of(text):
            # Empty lines before it, so that a traceback names the line of the page.
            source = "\n" * example.line + example.source
            code = compile(source, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                answer = FunctionType(code, module)()
                if inspect.iscoroutine(answer):
                    runner.run(answer)
            if example.printed is not None:
                assert output.getvalue() == example.printed, f"{name}, line {example.line}"


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


def verbs() -> dict[str, str]:
    """The port as the page writes it: each verb with the names of its arguments, and what it answers."""
    found = {}
    for name, member in vars(Store).items():
        if isinstance(member, property):
            assert member.fget is not None
            found[f"`{name}`"] = f"`{inspect.signature(member.fget).return_annotation}`"
        elif inspect.isfunction(member) and not name.startswith("_"):
            signature = inspect.signature(member)
            plain = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[1:]]
            found[f"`{name}{inspect.Signature(plain)}`"] = f"`{signature.return_annotation}`"
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_example_runs_and_prints_what_stands_below_it(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(text_of(page), name_of(page))


def test_the_pages_have_examples() -> None:
    without = ["CONTRIBUTING.md", "docs/README.md", "docs/decisions.md", "docs/glossary.md", "docs/states.md"]
    assert [name for page in PAGES if not examples_of(text_of(page)) and (name := name_of(page)) not in without] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_every_page_is_in_the_index() -> None:
    index = DOCS / "README.md"
    linked = {(DOCS / target).resolve() for target in LINK.findall(text_of(index))}
    assert [name_of(page) for page in sorted(DOCS.glob("*.md")) if page not in {*linked, index}] == []


def test_the_reference_of_the_store_has_each_verb_as_it_is_and_no_other() -> None:
    page = {verb: answer for verb, answer, does in tables_under(text_of(DOCS / "store.md"), "## The verbs") if does}
    assert page == verbs()


def test_the_reference_of_the_store_explains_every_verdict() -> None:
    page = [row[0] for row in tables_under(text_of(DOCS / "store.md"), "## Verdicts")]
    assert page == [f"`{acceptance.value}`" for acceptance in Acceptance]


def test_the_reference_of_the_store_explains_every_error() -> None:
    page = [row[0].strip("`") for row in tables_under(text_of(DOCS / "store.md"), "## Errors")]
    tree = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert sorted(page) == sorted(tree - {"FairlaneError"})


def test_the_page_of_the_sqlite_store_explains_every_table_of_the_file() -> None:
    schema = "".join(text_of(path) for path in sorted(MIGRATIONS.glob("*.sql")))
    page = [
        name
        for row in tables_under(text_of(DOCS / "sqlite.md"), "## The file")
        for name in re.findall(r"fairlane_\w+", row[0])
    ]
    made = re.findall(r"^CREATE (?:TABLE|VIEW) (\w+)", schema, re.MULTILINE)
    assert sorted(page) == sorted({*made, "fairlane_schema"})


def test_a_wrong_example_is_found() -> None:
    run("```python\nasync def one(): return 1\n```\n\n```python\nprint(await one())\n```\n\n```text\n1\n```\n", "page")
    with pytest.raises(AssertionError, match="page, line 1"):
        run("```python\nprint(1)\n```\n\n```text\n2\n```\n", "page")
    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n", "page")
    with pytest.raises(AssertionError, match="every example runs"):
        run("```python no-run\n1 / 0\n```\n", "page")


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One page\n[a](page.md) [b](#one-page) [c](other.md) [d](page.md#two) [e](https://example.org/x)\n"
    )
    assert list(broken_links(page)) == ["other.md", "page.md#two"]
