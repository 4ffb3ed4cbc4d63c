"""A Django app: ``"outbox.django"`` in INSTALLED_APPS.

    from outbox.django import outbox

    with transaction.atomic():
        order = Order.objects.create(…)
        outbox.add(Event("Order", order.pk, "OrderPlaced", {"total": order.total}))

`manage.py migrate` creates the tables, and the admin shows them. The setting OUTBOX is a dict; see ``conf``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.django.writer import DjangoOutbox, outbox

__all__ = ["DjangoOutbox", "outbox"]


def __getattr__(name: str) -> Any:
    # On first use: whoever only walks through the package's modules need not have Django.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outbox.django import writer

    return getattr(writer, name)
