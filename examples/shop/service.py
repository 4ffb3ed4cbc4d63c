"""What the shop does. Each function runs in the caller's transaction: rows and events are committed together or not."""

from __future__ import annotations

from models import Order, OrderLine
from sqlalchemy.orm import Session

from outbox import Event, Outbox

outbox = Outbox()


def place_order(session: Session, order_id: str, customer: str, articles: dict[str, int]) -> Order:
    """Place an order for the articles (name to price in cents): one event for the order and one for each line."""
    order = Order(id=order_id, customer=customer, status="placed", total_cents=0, seq=0)
    session.add(order)
    events = [_event(order, "OrderPlaced", 0)]
    for article, cents in articles.items():
        session.add(OrderLine(order_id=order_id, article=article, cents=cents))
        order.total_cents += cents
        events.append(_event(order, "OrderLineAdded", cents))
    outbox.add_many(session, events)
    return order


def pay_order(session: Session, order_id: str) -> None:
    """Mark the order as paid. The row lock keeps two payments of one order apart, and their events in order."""
    order = session.get_one(Order, order_id, with_for_update=True)
    order.status = "paid"
    outbox.add(session, _event(order, "OrderPaid", 0))


def _event(order: Order, event_type: str, cents: int) -> Event:
    order.seq += 1
    return Event(
        aggregate_type="Order",
        aggregate_id=order.id,
        event_type=event_type,
        payload={
            "order_id": order.id,
            "seq": order.seq,
            "customer": order.customer,
            "amount_cents": cents,
            "status": order.status,
        },
    )
