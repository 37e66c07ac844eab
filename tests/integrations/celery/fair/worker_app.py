"""What a worker process imports: ``celery -A tests.integrations.celery.fair.worker_app worker``."""

from .shop import from_environment

app = from_environment().app
