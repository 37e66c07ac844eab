"""Celery: tasks go to the least loaded of several queues. Requires a Redis or Valkey server; REDIS_URL names it.

python examples/celery_images/images.py

    queue_0 2
    queue_1 2
    queue_2 2
    queue_3 2
    cat-0.png … cat-7.png
    0 waiting, 0 running
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from celery import Celery

from fairlane.integrations.celery import LoadBalancer

URL = os.environ.get("REDIS_URL", "redis://localhost")
app = Celery("images", broker=URL, backend=URL)
app.conf.broker_connection_retry_on_startup = True
balancer = LoadBalancer(app, URL, queues=4, namespace="celery-images")


@app.task(name="resize")
def resize(name: str) -> str:
    """Make a picture smaller."""
    time.sleep(0.1)
    return f"{name}.png"


def main() -> None:
    """Publish eight tasks, start a worker for all queues, and wait for the results."""
    results = balancer.enqueue_many(resize.s(f"cat-{number}") for number in range(8))
    for queue, load in balancer.loads().items():
        print(queue, load.pending)
    command = [sys.executable, "-m", "celery", "-A", "images", "worker", "--concurrency", "2", "--loglevel", "ERROR"]
    worker = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL)
    try:
        names = results.get(timeout=60)
        print(names[0], "…", names[-1])
    finally:
        worker.terminate()
        worker.wait()
    loads = balancer.loads().values()
    print(sum(load.pending for load in loads), "waiting,", sum(load.running for load in loads), "running")


if __name__ == "__main__":
    main()
