"""Hints in errors for users of other task queues: their names, and Fairlane's equivalent.

An unknown attribute stays an AttributeError and an unknown argument a TypeError, so `hasattr`, duck typing and type
checkers see none of these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

ENQUEUE = "write `await {0}.enqueue(…)`, or `{0}.blocking.enqueue(…)` where there is no event loop"
OPTIONS = "write `await {0}.options(delay=30).enqueue(…)`; options are not passed with the arguments"
CALL = "write `{0}.call(…)`, and send it with app.enqueue_many, app.enqueue_on or app.broadcast"
MANY = "write `await app.enqueue_many([{0}.call(x) for x in …])`"

TASK: Mapping[str, str] = {
    **dict.fromkeys(("delay", "send", "kiq", "defer", "defer_async", "enqueue_job", "submit", "queue_job"), ENQUEUE),
    **dict.fromkeys(("apply_async", "send_with_options", "kicker", "configure", "schedule"), OPTIONS),
    "enqueue_in": "write `await {0}.options(delay=…).enqueue(…)`",
    "enqueue_at": "write `await {0}.options(run_at=…).enqueue(…)`",
    **dict.fromkeys(("s", "si", "signature", "subtask", "message", "message_with_options", "prepare"), CALL),
    **dict.fromkeys(("chunks", "map", "starmap", "batch_defer", "batch_defer_async"), MANY),
    "apply": "to run the function here, call it: `{0}(…)`",
    "run": "to run the function here, call it: `{0}(…)`",
    "fn": "to run the function here, call it: `{0}(…)`",
    "call_local": "to run the function here, call it: `{0}(…)`",
    "retry": "in the task function, `raise fairlane.Retry(delay=30)`",
    "request": "in the task function, `fairlane.current_job()` has the id and the attempt",
    "update_state": "in the task function, `fairlane.current_job().progress(…)`",
    "AsyncResult": "write `app.handle(id, {0})`",
}
"""Attributes of tasks; ``{0}`` is the name of the function."""

APP: Mapping[str, str] = {
    "send_task": "write `await task.enqueue(…)`, or `app.client.send([NewJob(…)])` where the code is not available",
    "enqueue_job": "write `await task.enqueue(…)`",
    **dict.fromkeys(
        ("conf", "config", "config_from_object"), "use Fairlane(settings=Settings(…)), or FAIRLANE_… variables"
    ),
    "autodiscover_tasks": "write `app.autodiscover(package)`",
    **dict.fromkeys(("actor", "job", "shared_task", "register_task"), "declare a task with `@app.task`"),
    **dict.fromkeys(
        ("periodic_task", "add_periodic_task", "cron", "schedule"),
        "declare a schedule with `@app.task(cron=…)` or `@app.task(every=…)`",
    ),
    **dict.fromkeys(("AsyncResult", "get_job", "fetch_job"), "write `app.handle(id)`"),
    **dict.fromkeys(("control", "inspect"), "use the operator methods of `app.client`"),
    **dict.fromkeys(
        ("worker_main", "start", "run_worker"), "start `fairlane worker -A module:app`, or `app.worker().run()`"
    ),
    **dict.fromkeys(("on_startup", "startup", "on_worker_init"), "write `@app.on_worker_start`"),
    **dict.fromkeys(("on_shutdown", "shutdown"), "write `@app.on_worker_stop`"),
    **dict.fromkeys(("middleware", "add_middleware", "add_middlewares"), "write a hook with `@app.around_job`"),
    **dict.fromkeys(
        ("group", "chord", "chain"), "send many jobs with `await app.enqueue_many(calls)`; there are no workflows"
    ),
}
"""Attributes of applications."""

HANDLE: Mapping[str, str] = {
    **dict.fromkeys(
        ("get", "wait", "wait_result", "get_result", "return_value", "latest_result"),
        "write `await job.result(timeout=…)`",
    ),
    **dict.fromkeys(("status", "get_status"), "write `await job.state()`"),
    **dict.fromkeys(("ready", "is_finished"), "write `(await job.state()).final`"),
    "successful": "write `await job.state() == 'completed'`",
    **dict.fromkeys(("failed", "is_failed"), "write `await job.state() == 'failed'`"),
    **dict.fromkeys(("traceback", "exc_info"), "write `(await job.job()).error`"),
    **dict.fromkeys(("info", "meta"), "write `await job.progress()`"),
    **dict.fromkeys(("revoke", "abort", "terminate"), "write `await job.cancel()`"),
    **dict.fromkeys(("requeue", "resend"), "write `await job.retry()`"),
    **dict.fromkeys(("forget", "delete"), "results are removed automatically after FAIRLANE_RETENTION_… seconds"),
}
"""Attributes of handles."""

OPTION: Mapping[str, str] = {
    **dict.fromkeys(("countdown", "defer_by", "_defer_by", "schedule_in"), "write delay=, in seconds"),
    **dict.fromkeys(("eta", "defer_until", "_defer_until", "schedule_at"), "write run_at=, an aware datetime"),
    "max_retries": "write retries=, the number of runs after the first",
    "max_tries": "write retries=, the number of runs after the first: one less than max_tries",
    "max_attempts": "write retries=, the number of runs after the first: one less than max_attempts",
    "retry": "write retries=, the number of runs after the first, and backoff=",
    "retry_on_error": "write retries=, the number of runs after the first",
    **dict.fromkeys(("autoretry_for", "retry_for", "retry_when"), "write retry_on=, exception classes"),
    **dict.fromkeys(("dont_autoretry_for", "throws"), "write no_retry_on=, exception classes"),
    **dict.fromkeys(
        ("retry_backoff", "retry_backoff_max", "retry_jitter", "default_retry_delay", "retry_delay", "min_backoff"),
        "write backoff=Backoff(base=…, most=…), in seconds",
    ),
    "max_backoff": "write backoff=Backoff(most=…), in seconds",
    **dict.fromkeys(("expires_in", "ttl", "age_limit", "_expires"), "write expires=, in seconds"),
    **dict.fromkeys(("time_limit", "soft_time_limit", "job_timeout"), "write timeout=, in seconds"),
    "rate_limit": "there is no rate limit; limit concurrency with app.queue(…, limit=…) or .lane(…, limit=…)",
    **dict.fromkeys(("task_id", "job_id", "_job_id", "message_id"), "write id=, in task.options(…)"),
    **dict.fromkeys(("queue_name", "routing_key", "exchange", "_queue_name"), "write queue="),
    **dict.fromkeys(("actor_name", "task_name"), "write name="),
    "at_front": "write priority='high'",
    "bind": "leave it out; in the task function, `fairlane.current_job()` is the job",
    **dict.fromkeys(("acks_late", "reject_on_worker_lost"), "leave it out: a job is acknowledged only after it ended"),
    **dict.fromkeys(("ignore_result", "store_results"), "leave it out: a result of None takes no space"),
    **dict.fromkeys(
        ("result_ttl", "failure_ttl", "keep_result", "result_expires"), "set FAIRLANE_RETENTION_…, for all jobs"
    ),
    "lock": "write lane=, and app.queue(…).lane(…, limit=1)",
    **dict.fromkeys(("queueing_lock", "unique_key", "singleton"), "write unique="),
    **dict.fromkeys(("crontab", "schedule", "run_every"), "write cron= or every="),
    **dict.fromkeys(("args", "kwargs"), "pass the arguments to enqueue(…), as in a call"),
    **dict.fromkeys(
        ("link", "link_error", "on_success", "on_failure", "depends_on"), "enqueue the next job from the task function"
    ),
    **dict.fromkeys(("serializer", "compression"), "leave it out: arguments are JSON"),
}
"""Options of tasks and of one call."""

MODULE: Mapping[str, str] = {
    **{
        name: APP[name]
        for name in ("shared_task", "actor", "job", "group", "chord", "chain", "periodic_task", "cron", "AsyncResult")
    },
    "crontab": APP["cron"],
    **dict.fromkeys(("Celery", "Broker", "WorkerSettings"), "create the application with `app = Fairlane(…)`"),
    "Queue": "write `app.queue(…)`",
    "Worker": APP["run_worker"],
    **dict.fromkeys(("signature", "subtask"), CALL.format("task")),
    **dict.fromkeys(("current_task", "get_current_job"), "write `fairlane.current_job()` in the task function"),
}
"""What other task queues offer for import."""

COMMAND: Mapping[str, str] = {
    **dict.fromkeys(("beat", "scheduler", "cron"), "leave it out: the workers fire the schedules"),
    **dict.fromkeys(
        ("flower", "dashboard", "web", "monitor"),
        "`fairlane serve` has the dashboard, and `fairlane top` a live screen",
    ),
    **dict.fromkeys(
        ("inspect", "info", "events", "report"), "see `fairlane status`, `fairlane workers` and `fairlane jobs`"
    ),
    "control": "see `fairlane pause`, `fairlane resume` and `fairlane limit`",
    **dict.fromkeys(("run", "start", "multi", "work"), "write `fairlane worker`, with --processes for several"),
    **dict.fromkeys(("call", "send", "defer"), "write `fairlane enqueue`"),
    **dict.fromkeys(("result", "show"), "write `fairlane job`"),
    "list": "write `fairlane jobs`",
    **dict.fromkeys(("revoke", "abort"), "write `fairlane cancel`"),
    "requeue": "write `fairlane retry`",
    **dict.fromkeys(
        ("empty", "flush", "clear"), "write `fairlane cancel` for waiting jobs, `fairlane purge` for ended ones"
    ),
}
"""Commands."""

COMMAND_OPTION: Mapping[str, str] = {
    **dict.fromkeys(
        ("--concurrency", "--autoscale", "--threads", "--max-jobs"), "write --slots (-c), the jobs that run at once"
    ),
    "--workers": "write --processes",
    "--loglevel": "write --log-level (-l)",
    **dict.fromkeys(("--beat", "-B", "--with-scheduler"), "leave it out: the workers fire the schedules"),
    **dict.fromkeys(("--broker", "-b", "--result-backend"), "write --url"),
    **dict.fromkeys(("--hostname", "-n", "--name"), "leave it out; --index gives a worker a fixed number"),
}
"""Options of commands."""


def no_attribute(
    owner: object, called: str, name: str, hints: Mapping[str, str], word: str = "", *, blocking: bool = False
) -> AttributeError:
    """The error for an unknown attribute, with Fairlane's equivalent if another task queue has that name."""
    hint = hints.get(name)
    suffix = f"; {hint.format(word)}" if hint is not None else ""
    if blocking:
        suffix = suffix.replace("await ", "")
    return AttributeError(f"{called} has no attribute {name!r}{suffix}", name=name, obj=owner)


def no_name(module: object, called: str, name: str, *, imported: bool) -> AttributeError | ImportError:
    """The error for an unknown name of a module. Python drops the message of an AttributeError in ``from … import``."""
    if imported and name in MODULE:
        return ImportError(f"cannot import name {name!r} from {called!r}; {MODULE[name]}", name=called)
    return no_attribute(module, f"module {called!r}", name, MODULE)


def bad_argument(
    exc: TypeError, function: str, given: Iterable[str], taken: Iterable[str], ours: Iterable[str]
) -> TypeError:
    """The error for a call with wrong arguments; if one of them is an option, the message says where it belongs."""
    problem = f"{function}(): {exc}"
    options = set(ours)
    for name in set(given) - set(taken):
        if name in options:
            return TypeError(f"{problem}; {name} is an option: write {function}.options({name}=…).enqueue(…)")
        if name in OPTION:
            return TypeError(
                f"{problem}; {name} is an option of another task queue: {OPTION[name]}, in {function}.options(…)"
            )
    return TypeError(problem)
