"""A Django app: ``"outbox.django"`` in INSTALLED_APPS.

    from outbox.django import outbox

    with transaction.atomic():
        order = Order.objects.create(…)
        outbox.add(Event("Order", order.pk, "OrderPlaced", {"total": order.total}))

`manage.py migrate` creates the tables, and the admin shows them. The setting OUTBOX is a dict; see ``conf``.
"""

from __future__ import annotations

from outbox.django.writer import DjangoOutbox, outbox

__all__ = ["DjangoOutbox", "outbox"]
