"""Hooks: one database connection for all jobs of a worker, the duration of every job, and a maintenance window.

fairlane worker -A examples/hooks.py
fairlane enqueue -A examples/hooks.py count apples --wait
"""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fairlane import Fairlane, RunningJob, RunningWorker, Snooze, current_worker

app = Fairlane()  # FAIRLANE_URL, else sqlite:///fairlane.db
log = logging.getLogger("hooks")


@app.on_worker_start
def connect(worker: RunningWorker) -> None:
    """Open the database once. If this raises, the worker does not start."""
    worker.state.database = sqlite3.connect(os.environ.get("STOCK", "stock.db"), check_same_thread=False)
    worker.state.lock = threading.Lock()
    with worker.state.database as database:
        database.execute("CREATE TABLE IF NOT EXISTS stock (what TEXT PRIMARY KEY, pieces INTEGER NOT NULL)")


@app.on_worker_stop
def disconnect(worker: RunningWorker) -> None:
    """Close it after the last job."""
    worker.state.database.close()


@app.around_job
def timed(job: RunningJob) -> Iterator[None]:
    """Log the duration of every job, including failed ones."""
    began = time.perf_counter()
    try:
        yield
    finally:
        log.info("%s took %.3f s", job.task, time.perf_counter() - began)


@app.around_job
def not_during_maintenance(job: RunningJob) -> Iterator[None]:
    """While the file exists, postpone jobs by a second, without charging an attempt."""
    if Path("maintenance").exists():
        raise Snooze(1)
    yield


@app.task
def count(what: str) -> int:
    """Count one more. Plain functions run in threads, which share the connection of the worker."""
    state = current_worker().state
    with state.lock, state.database as database:
        database.execute("INSERT INTO stock VALUES (?, 1) ON CONFLICT DO UPDATE SET pieces = pieces + 1", [what])
        [(pieces,)] = database.execute("SELECT pieces FROM stock WHERE what = ?", [what])
    return int(pieces)
