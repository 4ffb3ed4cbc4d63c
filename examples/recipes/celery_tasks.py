"""A Celery task whose row and event are committed together, once, however often it runs; and events that start tasks.

Run it in a shell:

    pip install 'outbox-kafka[relay]' celery
    export DATABASE_URL=postgresql+psycopg://localhost/shop KAFKA_SERVERS=localhost:9092
    export CELERY_BROKER_URL=amqp://localhost
    OUTBOX_DATABASE_URL=$DATABASE_URL outbox db upgrade
    python celery_tasks.py                  # creates the tables, and starts a task for each order
    celery --app celery_tasks worker
"""

from __future__ import annotations

import json
import os

import sqlalchemy as sa
from celery import Celery
from confluent_kafka import Consumer, KafkaError, KafkaException
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Event, Outbox


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    cents: Mapped[int]


class Payment(Base):
    __tablename__ = "payments"
    order_id: Mapped[str] = mapped_column(primary_key=True)
    cents: Mapped[int]


app = Celery("celery_tasks")  # this module's name: tasks have the same names when it is run as a script
engine = sa.create_engine(os.environ["DATABASE_URL"])  # connects at the first use, which is after Celery's fork
outbox = Outbox()


@app.task(acks_late=True, reject_on_worker_lost=True, autoretry_for=(OperationalError,), retry_backoff=True)
def take_payment(order_id: str, cents: int) -> None:
    """Write a payment and its event. Celery runs a task again if its worker dies, even after the commit."""
    with Session(engine) as session, session.begin():
        payment = insert(Payment).values(order_id=order_id, cents=cents).on_conflict_do_nothing()
        if session.execute(payment.returning(Payment.order_id)).first():
            outbox.add(session, Event("Payment", order_id, "PaymentTaken", {"cents": cents}))


def place_order(session: Session, order_id: str, cents: int) -> None:
    """Write an order and its event, which starts the task.

    take_payment.delay() here would start it before the commit, and for an order that is rolled back; after the commit,
    it would be lost if the process ended in between.
    """
    session.add(Order(id=order_id, cents=cents))
    outbox.add(session, Event("Order", order_id, "OrderPlaced", {"cents": cents}))


def start_tasks() -> None:
    """Start a task for each order that was placed, at least once."""
    kafka = Consumer(
        {
            "bootstrap.servers": os.environ["KAFKA_SERVERS"],
            "group.id": "start-tasks",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    kafka.subscribe([os.environ.get("ORDER_TOPIC", "order-events")])
    while True:
        message = kafka.poll(1.0)
        if message is None:
            continue
        if error := message.error():
            if error.code() == KafkaError._FATAL:  # this client never reads again
                raise KafkaException(error)
            print(f"Kafka: {error}")
            continue
        headers = dict(message.headers())
        if headers["ce_type"] == b"OrderPlaced":
            order = message.key().decode(), json.loads(message.value())["cents"]
            take_payment.apply_async(order, task_id=headers["ce_id"].decode())
        kafka.commit(message, asynchronous=False)


if __name__ == "__main__":
    Base.metadata.create_all(engine)
    start_tasks()
