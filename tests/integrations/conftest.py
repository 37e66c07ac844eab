"""Integrations are tested in a user's project directory, like commands."""

from tests.cli.conftest import every_store, project

__all__ = ["every_store", "project"]
