"""An application that takes its time to import, in a child process of a worker."""

from __future__ import annotations

import os
import time

from fairlane import Fairlane

if "FAIRLANE_TEST_SLOW" in os.environ:
    time.sleep(1.5)

app = Fairlane("sqlite:///never-opened.db")


@app.task(timeout=1.0, retries=0)
def quick() -> str:
    return "in time"
