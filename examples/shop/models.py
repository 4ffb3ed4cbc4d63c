"""The shop's own tables, without anything of the outbox."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey, Integer, MetaData, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class Base(DeclarativeBase):
    """Everything lives in the schema ``shop``."""

    metadata = MetaData(schema="shop")


class Order(Base):
    """An order. ``seq`` counts its events, so that a reader can detect a missing one."""

    __tablename__ = "orders"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    customer: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(Text, default="placed")
    total_cents: Mapped[int] = mapped_column(BigInteger, default=0)
    seq: Mapped[int] = mapped_column(Integer, default=0)
    lines: Mapped[list[OrderLine]] = relationship(back_populates="order")


class OrderLine(Base):
    """One position of an order."""

    __tablename__ = "order_lines"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    order_id: Mapped[str] = mapped_column(ForeignKey("shop.orders.id"))
    article: Mapped[str] = mapped_column(Text)
    cents: Mapped[int] = mapped_column(BigInteger)
    order: Mapped[Order] = relationship(back_populates="lines")
