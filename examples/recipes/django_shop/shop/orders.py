"""What the shop does."""

from __future__ import annotations

from django.db import transaction

from outbox import Event
from outbox.django import outbox

from .models import Order


@transaction.atomic
def place_order(customer_id: int, total_cents: int) -> Order:
    """Write an order and its event. Raises IntegrityError, at the commit, if there is no such customer."""
    order = Order.objects.create(customer_id=customer_id, total_cents=total_cents)
    outbox.add(Event("Order", order.pk, "OrderPlaced", {"customer": customer_id, "total_cents": total_cents}))
    return order
