"""Django: a job is stored in the transaction of its order, and uses the ORM in the worker.

python examples/django_orders.py

    1 order, 1 job
    tea is packed
"""

import subprocess
import sys
from contextlib import suppress

import django
from django.conf import settings
from django.db import connection, models, transaction

from fairlane import Fairlane
from fairlane.integrations.django import install

FILE = "django_orders.db"
DATABASE = {"ENGINE": "django.db.backends.sqlite3", "NAME": FILE, "OPTIONS": {"transaction_mode": "IMMEDIATE"}}

# A project has these two in modules of their own: see docs/howto/django.md.
settings.configure(DATABASES={"default": DATABASE})
django.setup()

app = Fairlane(f"sqlite:///{FILE}")  # the same file: this is what enqueue_on needs
install(app)


class Order(models.Model):
    """What a customer wants."""

    item = models.CharField(max_length=100)
    packed = models.BooleanField(default=False)

    class Meta:
        """The name that an installed application would have."""

        app_label = "orders"


@app.task(name="pack")
def pack(id: int) -> str:
    """A plain function has its own connection of Django."""
    order = Order.objects.get(id=id)
    order.packed = True
    order.save()
    return f"{order.item} is packed"


def place_order(item: str) -> str:
    """Store an order with its job. Returns the id of the job."""
    with transaction.atomic():
        order = Order.objects.create(item=item)
        [job] = app.blocking.enqueue_on(connection, pack.call(order.id))
        if item == "coal":
            raise ValueError("sold out")
    return job.id


def main() -> None:
    """Place two orders, of which one is rolled back, and let a worker run the job of the other."""
    with app.blocking as client:
        client.queues()  # opens the store before the first transaction
        with connection.schema_editor() as editor:
            editor.create_model(Order)
        id = place_order("tea")
        with suppress(ValueError):
            place_order("coal")
        print(Order.objects.count(), "order,", len(client.find().jobs), "job")

        worker = subprocess.Popen([sys.executable, "-m", "fairlane", "worker", "-A", __file__, "--log-level", "error"])
        print(client.handle(id).result(timeout=30))
        worker.terminate()
        worker.wait()


if __name__ == "__main__":
    main()
