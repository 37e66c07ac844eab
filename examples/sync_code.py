"""Synchronous code: the same operations without an event loop. Plain functions run in threads of the worker.

python examples/sync_code.py

    pending, place 1
    ann/a cat.png
    1 of 1 finished jobs
"""

import subprocess
import sys

from fairlane import Fairlane

app = Fairlane()  # FAIRLANE_URL, else sqlite:///fairlane.db


@app.task(name="render", lane="user:{user}")
def render(user: str, prompt: str) -> str:
    """Draw a picture."""
    return f"{user}/{prompt}.png"


def main() -> None:
    """Send a job, start a worker as a process, and wait for the result."""
    with app.blocking as client:
        job = render.blocking.enqueue("ann", "a cat")
        position = job.position()
        assert position is not None
        print(f"{job.state().value}, place {position.place}")
        command = [sys.executable, "-m", "fairlane", "worker", "-A", __file__, "--burst", "--log-level", "error"]
        subprocess.run(command, check=True)
        print(job.result(timeout=30))
        [counts] = [queue.counts for queue in client.queues() if queue.name == "default"]
        print(counts.completed, "of", counts.completed + counts.pending, "finished jobs")


if __name__ == "__main__":
    main()
