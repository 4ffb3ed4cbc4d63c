"""What the shop does."""

from __future__ import annotations

from uuid import UUID

from django.db import DEFAULT_DB_ALIAS, connections, transaction

from outbox import Event, Outbox

from .models import Order

outbox = Outbox()


def announce(event: Event, using: str = DEFAULT_DB_ALIAS) -> UUID:
    """Write an event in the block of transaction.atomic() that is open. Raises TargetError if there is none."""
    connections[using].ensure_connection()  # outside of a block Django may not have connected yet
    return outbox.add(connections[using].connection, event)


@transaction.atomic
def place_order(customer_id: int, total_cents: int) -> Order:
    """Write an order and its event. Raises IntegrityError, at the commit, if there is no such customer."""
    order = Order.objects.create(customer_id=customer_id, total_cents=total_cents)
    announce(Event("Order", order.pk, "OrderPlaced", {"customer": customer_id, "total_cents": total_cents}))
    return order
