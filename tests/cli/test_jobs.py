"""Commands that send, show and change jobs."""

import json

import pytest

from fairlane.model.session import NewSession, SessionKind
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import fail
from fairlane.store.port import Store
from tests.cli.conftest import EXAMPLES
from tests.cli.project import Project, eventually


def test_arguments_are_json_where_they_are_json(project: Project) -> None:
    id = project.read("enqueue", "any.task", "42", "text", '"42"', "[1, 2]", "007", "--kwargs", '{"user": "ann"}')["id"]
    assert project.read("job", id)["payload"] == [[42, "text", "42", [1, 2], "007"], {"user": "ann"}]


def test_a_job_sent_by_name_has_the_options_of_the_command_line(project: Project) -> None:
    id = project.read(
        *("enqueue", "any.task", "--queue", "mail", "--lane", "user:ann", "--priority", "high"),
        *("--delay", "60", "--unique", "once", "--sticky", "plan-7", "--id", "mine"),
    )["id"]
    job = project.read("job", id)
    assert id == "mine"
    assert (job["queue"], job["lane"], job["priority"], job["unique"]) == ("mail", "user:ann", "high", "once")
    assert (job["sticky"], job["state"]) == ("plan-7", "scheduled")
    assert 50 < job["eta"] <= 60
    assert "due in" in job["why"]


def test_a_job_of_an_application_is_checked_and_gets_its_lane(project: Project) -> None:
    id = project.read("enqueue", "-A", "shop", "render", "ann", "a dog")["id"]
    job = project.read("job", id)
    assert (job["task"], job["queue"], job["lane"]) == ("shop.render", "images", "user:ann")


@pytest.mark.parametrize(
    ("args", "output"),
    [
        (("render", "ann", "42"), "prompt"),
        (("render",), "user"),
        (("rendr", "ann"), "shop.render"),
        (("render", "ann", "--kwargs", "[1]"), "--kwargs"),
        (("render", "ann", "--kwargs", '{"colour": 1}'), "colour"),
        (("render", "ann", "--delay", "-1"), "delay"),
        ((), "TASK"),
    ],
)
def test_a_bad_job_is_rejected_with_the_name_of_what_is_wrong(
    project: Project, args: tuple[str, ...], output: str
) -> None:
    assert output in project.refused("enqueue", "-A", "shop", *args)
    assert project.read("jobs")["jobs"] == []


@pytest.mark.usefixtures("every_store")
def test_the_same_id_makes_no_second_job(project: Project) -> None:
    assert project.read("enqueue", "any.task", "--id", "one")["created"]
    assert not project.read("enqueue", "any.task", "--id", "one")["created"]
    assert "id" in project.refused("enqueue", "other.task", "--id", "one", code=1)


def test_a_file_of_jobs_is_sent(project: Project) -> None:
    lines = [{"id": f"job-{n}", "args": [f"user-{n % 3}"], "priority": "low"} for n in range(1_500)]
    project.write("jobs.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    assert project.read("enqueue", "-A", "shop", "render", "--from-file", "jobs.jsonl") == {"created": 1500, "known": 0}
    assert project.read("enqueue", "-A", "shop", "render", "--from-file", "jobs.jsonl") == {"created": 0, "known": 1500}
    [queue] = [queue for queue in project.read("queues")["queues"] if queue["name"] == "images"]
    assert (queue["pending"], queue["classes"]["low"]["pending"]) == (1500, 1500)


@pytest.mark.parametrize(
    "line", ["{", '{"task": "shop.render", "args": [1]}', '{"task": "shop.render", "colour": 1}', '{"args": []}']
)
def test_a_bad_line_is_reported_by_its_number(project: Project, line: str) -> None:
    project.write("jobs.jsonl", '{"task": "shop.render", "args": ["ann"]}\n' + line)
    assert "line 2" in project.refused("enqueue", "-A", "shop", "--from-file", "jobs.jsonl")


@pytest.mark.usefixtures("every_store")
def test_a_list_goes_on_where_it_ended(project: Project) -> None:
    for n in range(5):
        project.good("enqueue", "any.task", "--id", f"job-{n}", "--queue", "a" if n % 2 else "b")
    first = project.read("jobs", "--limit", "3")
    rest = project.read("jobs", "--limit", "3", "--cursor", first["cursor"])
    assert [job["id"] for job in first["jobs"] + rest["jobs"]] == [f"job-{n}" for n in (4, 3, 2, 1, 0)]
    assert rest["cursor"] is None
    assert [job["id"] for job in project.read("jobs", "--queue", "a")["jobs"]] == ["job-3", "job-1"]
    assert project.read("jobs", "--state", "failed")["jobs"] == []


def test_tables_show_ids_in_full(project: Project) -> None:
    id = project.read("enqueue", "any.task", "--lane", "x" * 150)["id"]
    assert id in project.good("jobs")
    assert id in project.good("status", id)


def test_an_unknown_job_is_not_found(project: Project) -> None:
    assert "nothing-of-that-name" in project.refused("job", "nothing-of-that-name", code=1)
    assert "nothing-of-that-name" in project.refused("cancel", "nothing-of-that-name", code=1)
    assert "nothing-of-that-name" in project.refused("retry", "nothing-of-that-name", code=1)


@pytest.mark.usefixtures("every_store")
def test_a_waiting_job_is_cancelled_at_once(project: Project) -> None:
    id = project.read("enqueue", "any.task")["id"]
    assert project.read("cancel", id) == {"jobs": [{"id": id, "answer": "cancelled"}]}
    assert project.read("job", id)["state"] == "cancelled"


async def _fail_all(store: Store, error: str = "it broke") -> None:
    """Claim all waiting jobs, and fail them."""
    from fairlane.model.ids import new_id
    from fairlane.model.job import Priority, Reason
    from fairlane.model.session import Claim

    session = await store.register(
        NewSession(id=new_id(), kind=SessionKind.WORKER, queues=("default",), slots=Slots(total=50))
    )
    asks = (Ask("default", Priority.NORMAL, 50),)
    claimed = await store.claim(session.id, Claim(number=1, asks=asks, total=50))
    await store.finish(session.id, [fail(job.held, Reason.ERROR, error, group="broken") for job in claimed])
    await store.leave(session.id, begun=[])


def _failed(project: Project, count: int, error: str = "it broke") -> list[str]:
    import asyncio

    ids = [project.read("enqueue", "any.task", "--lane", f"user:{n}")["id"] for n in range(count)]
    asyncio.run(project.with_store(lambda store: _fail_all(store, error)))
    return ids


@pytest.mark.usefixtures("every_store")
def test_a_failed_job_is_retried_as_a_new_one(project: Project) -> None:
    [id] = _failed(project, 1)
    assert "only a job that has ended" in project.refused("retry", project.read("enqueue", "any.task")["id"])
    [answer] = project.read("retry", id)["jobs"]
    assert answer["retry_of"] == id
    assert project.read("job", answer["id"])["retry_of"] == id


@pytest.mark.usefixtures("every_store")
def test_all_failed_jobs_are_retried_once_however_often_it_is_asked(project: Project) -> None:
    _failed(project, 3)
    for where, retried, already in (((), 3, 0), ((), 0, 3), (("--queue", "other"), 0, 0)):
        output = project.read("retry", "--failed", "--yes", *where)
        assert (output["retried"], output["already_retried"]) == (retried, already)


def test_retrying_everything_asks_first(project: Project) -> None:
    _failed(project, 1)
    assert project.run("retry", "--failed", stdin="n\n").exit_code == 1
    assert project.read("jobs", "--state", "pending")["jobs"] == []
    assert "1 of 1 job retried" in project.run("retry", "--failed", stdin="y\n").stdout


def test_retry_wants_to_know_what(project: Project) -> None:
    assert "--failed" in project.refused("retry")
    assert "--failed" in project.refused("retry", "job", "--failed")
    assert "--queue" in project.refused("retry", "job", "--queue", "a")


def test_jobs_names_the_error_whatever_lines_its_message_has(project: Project) -> None:
    [id] = _failed(project, 1, '  File "a.py", line 1, in f\nValueError: no paint\nat all\n')
    table = project.good("jobs")
    assert "error: ValueError: no paint" in table
    assert "at all" not in table
    assert "at all" in project.good("job", id)


def test_words_of_users_do_nothing_to_the_terminal(project: Project) -> None:
    error = "Traceback\n\x1b[2J\x1b[31mred\x07 [bold]loud[/bold] :smile: \x9b2J"
    [id] = _failed(project, 1, error)
    project.good("enqueue", "any.task", "--lane", "[red]ann[/red]", "--queue", "other")
    for text in (project.good("jobs"), project.good("job", id), project.good("lanes", "other")):
        assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert "[bold]loud[/bold]" in project.good("job", id)
    assert "\\x1b[31mred" in project.good("job", id)
    assert "[red]ann[/red]" in project.good("lanes", "other")


def test_wait_prints_the_result_of_a_worker(project: Project) -> None:
    worker = project.start("worker", "-A", "shop", "--log-level", "warning")
    assert project.good("enqueue", "-A", "shop", "render", "ann", "a dog", "--wait").strip() == '"ann: a dog"'
    answer = project.read("enqueue", "shop.render", "bob", "-q", "images", "--wait")
    assert answer["result"] == "bob: a cat"
    output = project.refused("enqueue", "-A", "shop", "spoil", "no paint", "--wait", code=1)
    assert "no paint" in output
    output = project.refused("enqueue", "-A", "shop", "nap", "30", "--wait-timeout", "0.3", code=1)
    assert "it continues" in output
    [napping] = eventually(lambda: project.read("jobs", "--state", "running")["jobs"])
    assert project.read("cancel", napping["id"])["jobs"][0]["answer"] == "requested"
    assert eventually(lambda: project.read("jobs", "--state", "cancelled")["jobs"])
    [failed] = project.read("jobs", "--state", "failed", "--queue", "images")["jobs"]
    [attempt] = project.read("job", failed["id"])["attempts"]
    assert attempt["reason"] == "error"
    assert "no paint" in project.good("job", failed["id"])
    project.stop(worker)


@pytest.mark.usefixtures("every_store")
def test_status_of_a_job_shows_its_place_and_why(project: Project) -> None:
    ids = [project.read("enqueue", "any.task", "--lane", "user:ann")["id"] for _ in range(3)]
    document = project.read("status", ids[2])
    assert document["position"]["ahead"] == 2
    assert "no live worker" in document["why"]
    text = project.good("status", ids[2])
    assert "3 of 3" in text
    assert "no live worker" in text


def test_an_example_works_as_described(project: Project) -> None:
    (project.path / "shop.py").unlink()
    example = str(EXAMPLES / "shop.py")
    worker = project.start("worker", "-A", example, "--log-level", "warning")
    out = project.good("enqueue", "-A", example, "answer", "flux", "why?", "--wait")
    assert "flux has thought about" in out
    project.stop(worker)


def test_waiting_in_vain_reports_what_is_missing(project: Project) -> None:
    project.write(
        "lonely.py", "from fairlane import Fairlane\napp = Fairlane()\n@app.task\nasync def hello() -> None: ...\n"
    )
    process = project.start("enqueue", "-A", "lonely", "hello", "--wait", "--wait-timeout", "4")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "waiting: no live worker serves queue default" in error
