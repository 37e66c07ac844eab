"""Sticky plans on Celery: all steps of a plan run on the worker that has its files, until the plan is released.

Needs a Redis or Valkey server (`REDIS_URL`, or one on this machine) and two workers, each in a terminal of its own:

    celery -A examples.celery_plans.plans worker -c 2 -n w0@%h --index 0
    celery -A examples.celery_plans.plans worker -c 2 -n w1@%h --index 1

python examples/celery_plans/plans.py

    plan-7: org.worker-0, org.worker-0
    plan-8: org.worker-1, org.worker-1
    buffers: 0 completed, 1 completed
    release of plan-7: draining
    plan-7 is released, plan-8 is open
    release of plan-99: nothing
"""

import os
import time
from typing import Any

from celery import Celery

from fairlane import Fairlane
from fairlane.integrations.celery import StickyRouter

URL = os.environ.get("REDIS_URL", "redis://localhost")

app = Celery("plans", broker=URL, backend=URL)
app.conf.task_routes = {"remove_from_buffer": {"queue": "org.broadcast"}}
router = StickyRouter(app, Fairlane(URL), org="org")


@app.task(name="prepare", bind=True)
def prepare(self: Any, plan: str) -> str:
    """The first step: the store chooses the worker."""
    return str(self.request.delivery_info["routing_key"])


@app.task(name="compute", bind=True)
def compute(self: Any, first: str, plan: str) -> list[str]:
    """The second step, where the files of the first one are."""
    return [first, str(self.request.delivery_info["routing_key"])]


@app.task(name="delete_files")
def delete_files(plan: str) -> None:
    """Runs last and alone on the worker of the plan."""


@app.task(name="remove_from_buffer")
def remove_from_buffer(model: str) -> None:
    """Runs on every worker."""


def main() -> None:
    """Run two plans, remove a model everywhere, and release one plan."""
    for plan in ("plan-7", "plan-8"):
        result = router.enqueue(prepare.s(plan) | compute.s(plan), key=plan)
        print(f"{plan}:", ", ".join(result.get(timeout=60)))

    states = router.broadcast(remove_from_buffer.s("model-3")).wait(60)
    print("buffers:", ", ".join(f"{index} {state.value}" for index, state in states.items()))

    print("release of plan-7:", router.release("plan-7", cleanup=delete_files.si("plan-7")).value)
    while router.history("plan-7")[-1].state == "draining":
        time.sleep(0.1)
    last = {plan: router.history(plan)[-1].state.value for plan in ("plan-7", "plan-8")}
    print(", ".join(f"{plan} is {state}" for plan, state in last.items()))
    print("release of plan-99:", router.release("plan-99", cleanup=delete_files.si("plan-99")).value)
    router.release("plan-8")


if __name__ == "__main__":
    main()
