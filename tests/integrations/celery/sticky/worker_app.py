"""What a worker process imports: ``celery -A tests.integrations.celery.sticky.worker_app worker``."""

from .plans import from_environment

app = from_environment().app
