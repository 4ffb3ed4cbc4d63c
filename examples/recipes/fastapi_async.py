"""A shop with FastAPI and SQLAlchemy's asyncio: an order and its event are committed together.

Run it in a shell:

    pip install 'outbox-kafka[relay]' 'sqlalchemy[asyncio]' asyncpg 'fastapi>=0.121' uvicorn
    export DATABASE_URL=postgresql+asyncpg://localhost/shop
    OUTBOX_DATABASE_URL=$DATABASE_URL outbox db upgrade
    uvicorn fastapi_async:app
    psql shop -c "INSERT INTO articles VALUES ('tea', 10)"
    curl localhost:8000/orders --json '{"article": "tea", "quantity": 2}'
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outbox import AsyncOutbox, Event

outbox = AsyncOutbox()


class Base(DeclarativeBase):
    """The shop's tables, without anything of the outbox."""


class Article(Base):
    """An article and its stock."""

    __tablename__ = "articles"
    name: Mapped[str] = mapped_column(primary_key=True)
    stock: Mapped[int]


class Order(Base):
    """An order."""

    __tablename__ = "orders"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    article: Mapped[str]
    quantity: Mapped[int]


class NewOrder(BaseModel):
    """A customer's request, and the event's payload."""

    article: str
    quantity: int


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the engine for as long as the application runs."""
    app.state.engine = create_async_engine(os.environ["DATABASE_URL"])
    async with app.state.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await app.state.engine.dispose()


async def transaction(request: Request) -> AsyncIterator[AsyncSession]:
    """Yield an endpoint's session in a transaction: committed when it returns, rolled back when it raises."""
    async with AsyncSession(request.app.state.engine) as session, session.begin():
        yield session


# scope="function": commit before the answer is sent. By default FastAPI commits after it, and the 201 may be untrue.
Transaction = Annotated[AsyncSession, Depends(transaction, scope="function")]
app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place_order(new: NewOrder, session: Transaction) -> dict[str, uuid.UUID]:
    """Place an order; 409, and neither order nor event, if the stock is too low."""
    order = Order(id=uuid.uuid4(), article=new.article, quantity=new.quantity)
    session.add(order)
    await outbox.add(session, Event("Order", order.id, "OrderPlaced", new))
    take = update(Article).where(Article.name == new.article, Article.stock >= new.quantity)
    left = await session.scalar(take.values(stock=Article.stock - new.quantity).returning(Article.stock))
    if left is None:
        raise HTTPException(409, f"out of stock: {new.article}")
    return {"id": order.id}
