"""A shop with Flask and SQLAlchemy: an order and its event are committed together.

Run it in a shell:

    pip install 'outbox-kafka[relay]' flask
    export DATABASE_URL=postgresql+psycopg://localhost/shop
    OUTBOX_DATABASE_URL=$DATABASE_URL outbox db upgrade
    flask --app flask_shop run
    psql shop -c "INSERT INTO articles VALUES ('tea', 10)"
    curl localhost:5000/orders --json '{"article": "tea", "quantity": 2}'
"""

from __future__ import annotations

import os
from typing import Any

from flask import Flask, request
from sqlalchemy import create_engine, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from outbox import Event, Outbox

outbox = Outbox()


class Base(DeclarativeBase):
    """The shop's tables, without anything of the outbox."""


class Article(Base):
    """An article and its stock."""

    __tablename__ = "articles"
    name: Mapped[str] = mapped_column(primary_key=True)
    stock: Mapped[int]


class Order(Base):
    """An order. The database gives it its id."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    article: Mapped[str]
    quantity: Mapped[int]


class OutOfStock(Exception):
    """The stock of the article is too low."""


def create_app() -> Flask:
    """Return the application, with an engine of its own."""
    app = Flask(__name__)
    engine = create_engine(os.environ["DATABASE_URL"])
    Base.metadata.create_all(engine)
    transaction = sessionmaker(engine, expire_on_commit=False).begin

    @app.post("/orders")
    def place_order() -> tuple[dict[str, Any], int]:
        article, quantity = request.json["article"], request.json["quantity"]
        with transaction() as session:  # commits at its end; an exception rolls the order and its event back
            order = Order(article=article, quantity=quantity)
            session.add(order)
            session.flush()  # now it has an id
            outbox.add(session, Event("Order", order.id, "OrderPlaced", {"article": article, "quantity": quantity}))
            take = update(Article).where(Article.name == article, Article.stock >= quantity)
            left = session.scalar(take.values(stock=Article.stock - quantity).returning(Article.stock))
            if left is None:
                raise OutOfStock(article)
        return {"id": order.id}, 201  # outside of the block: the order is committed

    @app.errorhandler(OutOfStock)
    def refuse(error: OutOfStock) -> tuple[dict[str, Any], int]:
        return {"error": f"out of stock: {error}"}, 409

    return app
