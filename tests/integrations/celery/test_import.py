"""Celery is optional: Fairlane never imports it by itself, and the integration says what is missing."""

import subprocess
import sys


def run(program: str) -> str:
    """What a program prints."""
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def test_fairlane_does_not_import_celery() -> None:
    assert run("import sys, fairlane; print('celery' in sys.modules)") == "False\n"


def test_without_celery_the_integration_names_the_extra() -> None:
    program = """
import sys
sys.modules["celery"] = None
try:
    import fairlane.integrations.celery
except ModuleNotFoundError as exc:
    print(exc)
"""
    assert "requires Celery: pip install 'fairlane[celery]'" in run(program)
