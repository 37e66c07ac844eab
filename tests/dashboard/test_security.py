"""Guarantees of the pages: no script from data, no request to other hosts, and no more rights than the token has."""

from __future__ import annotations

import json
from urllib.parse import quote, unquote

import httpx
import pytest
from playwright.sync_api import Page, expect

from fairlane.http.pages import page_files

from .conftest import OpenPage, Watched
from .served import Served

SCRIPT = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
TURNED = "abc\u202ecba\u2066x\u2069"
CONTROLS = "bell\u0007nul\u0001esc\u001b[31m"
HOSTILE = f"{SCRIPT} {TURNED} {CONTROLS}"
LONG = "x" * 100_000


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()


def test_the_policy_forbids_inline_scripts_and_other_origins(served: Served) -> None:
    answer = httpx.get(served.address)
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    page = answer.text
    assert "<script>" not in page
    assert " style=" not in page
    assert " onload=" not in page
    for name, file in page_files().items():
        if not name.endswith(".svg"):
            assert b"http://" not in file.body.replace(b"http://www.w3.org/", b""), name
            assert b"https://" not in file.body, name


def test_a_browser_enforces_the_policy(open_page: OpenPage, watched: Watched) -> None:
    page = open_page()
    expect(page.get_by_role("navigation")).to_be_visible()
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.owned = 1\">')")
    page.evaluate(
        "const s = document.createElement('script'); s.textContent = 'window.owned = 1'; document.body.append(s)"
    )
    page.wait_for_function("true")
    assert page.evaluate("window.owned") is None
    assert len(watched.errors) >= 1
    assert all("Content Security Policy" in error or "404" in error for error in watched.errors)
    watched.errors.clear()


def test_signing_in_sets_a_cookie_that_scripts_cannot_read(
    served: Served, open_page: OpenPage, watched: Watched
) -> None:
    watched.tolerant = True
    token = served.token("operate")
    page = open_page()
    sign_in(page, "fl_wrong")
    expect(page.get_by_role("alert")).to_contain_text("token: is not valid")
    sign_in(page, token)
    expect(page.get_by_role("navigation")).to_be_visible()
    [cookie] = page.context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert cookie["expires"] - page.evaluate("Date.now() / 1000") <= 3_700
    assert token not in page.evaluate("document.cookie + JSON.stringify({...localStorage, ...sessionStorage})")
    assert token not in page.content()
    page.reload()
    expect(page.get_by_role("navigation")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_text("You have signed out.")).to_be_visible()
    assert page.context.cookies() == []


def test_a_revoked_token_ends_the_session(served: Served, open_page: OpenPage, watched: Watched) -> None:
    watched.tolerant = True
    page = open_page()
    sign_in(page, served.token("read"))
    expect(page.locator("[data-connection=live]")).to_be_visible()
    [token] = served.run(served.app.client.tokens())
    served.run(served.app.client.revoke_token(token.id))
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_reader_is_offered_no_action(served: Served, open_page: OpenPage, watched: Watched) -> None:
    watched.tolerant = True
    id = served.send("render", "ann")
    served.send("charge", "ann")
    served.send("render", "ann", sticky="plan-7", queue="models", lane="x")
    with served.working():
        secret = served.token("read")
        page = open_page()
        sign_in(page, secret)
        for path, seen in (
            ("", "images"),
            ("queues/images", "Starts next"),
            ("queues/images/lanes/user%3Aann", "No job is in line"),
            (f"jobs/{id}", "completed"),
            ("failures", "card declined"),
            ("workers", "plan-7"),
            ("schedules", "nightly"),
        ):
            page.goto(f"{served.address}#/{path}")
            expect(page.get_by_role("main")).to_contain_text(seen)
            names = page.get_by_role("main").get_by_role("button").all_inner_texts()
            assert set(names) <= {"Copy as Python", "Copy as curl", "Show more lanes"}, (path, names)
    # An action that is not offered is also rejected.
    headers = {"Cookie": f"fairlane_token_{served.port}={secret}"}
    assert httpx.post(f"{served.address}api/v1/queues/images/pause", headers=headers).status_code == 403


def test_a_token_for_one_queue_sees_that_queue_alone(served: Served, open_page: OpenPage, watched: Watched) -> None:
    watched.tolerant = True
    served.send("render", "ann")
    served.send("charge", "ann")
    made = served.app.client.make_token("images only", ["read"], queues=["images"])
    page = open_page()
    sign_in(page, served.run(made)[1])
    expect(page.locator("[data-queue]")).to_have_count(1)
    expect(page.get_by_role("navigation").get_by_role("link")).to_have_text(["Overview"])
    page.locator('[data-queue="images"]').get_by_role("link").click()
    expect(page.locator('[data-lane="user:ann"]')).to_be_visible()
    page.goto(f"{served.address}#/queues/payments")
    expect(page.get_by_role("alert")).to_contain_text("this token is bound to other queues")


@pytest.fixture
def hostile(served: Served) -> str:
    """A system with hostile text in every field that takes text."""

    @served.app.task(name="evil", queue="images", lane="{who}", retries=0)
    async def evil(who: str, text: str, more: str) -> str:
        raise ValueError(text)

    @served.app.task(name="echo", queue="images", lane="{who}")
    async def echo(who: str, text: str, more: str) -> str:
        return text + more

    # Lanes and keys must be printable; arguments, results and errors may be anything.
    served.send("evil", SCRIPT, HOSTILE, LONG)
    id = served.send("echo", SCRIPT, HOSTILE, LONG, sticky=SCRIPT, unique=SCRIPT)
    served.burst()
    served.send("echo", SCRIPT, HOSTILE, LONG)
    return id


def test_hostile_text_is_shown_as_text_on_every_page(
    served: Served, open_page: OpenPage, watched: Watched, hostile: str
) -> None:
    watched.tolerant = True  # one of the pages is about a job that does not exist
    lane = page_path(SCRIPT)
    page = open_page()
    [failed] = served.run(served.app.client.failures())
    for path in (
        *("", "queues/images", f"queues/images/lanes/{lane}", f"jobs/{hostile}", f"jobs/{failed.example_id}"),
        *("failures", "workers", f"search?q={lane}", "schedules", lane, f"jobs/{lane}"),
    ):
        page.goto(f"{served.address}#/{path}")
        expect(page.locator(f"main[data-page={json.dumps(unquote(path.partition('?')[0]))}]")).to_be_visible()
        expect(page.locator("[aria-busy]")).to_have_count(0)
        if path not in ("", "schedules", lane):
            expect(page.get_by_role("main")).to_contain_text("<script>")
        text = page.get_by_role("main").inner_text()
        assert not {"\u202e", "\u2066", "\u0007", "\u0001", "\u001b"} & set(text), path
        assert page.locator("main script, main img").count() == 0
        assert "owned" not in page.title().partition("<")[0]
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
    page.goto(f"{served.address}#/jobs/{hostile}")
    result = page.get_by_label("Result")
    expect(result).to_contain_text("\\u202e")
    expect(result).to_contain_text("\\u0007")
    assert len(result.inner_text()) < 10_000
    page.get_by_role("button", name="Show all").first.click()
    page.wait_for_function("[...document.querySelectorAll('pre')].some((each) => each.textContent.length > 100000)")


def page_path(text: str) -> str:
    return quote(text, safe="")
