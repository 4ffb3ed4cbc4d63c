"""Tests of the shop, with a real Postgres that the fixture starts.

Run them in a shell:

    pip install 'outbox-kafka[sandbox]' 'sqlalchemy[asyncio]' asyncpg 'fastapi>=0.121' httpx2 pytest
    pytest test_fastapi_async.py
"""

from __future__ import annotations

import asyncio

import pytest
from fastapi.testclient import TestClient
from fastapi_async import Article, Base, NewOrder, app, place_order
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from outbox.testing import recorded_events_async
from outbox.testing.fixtures import Database
from outbox.urls import sqlalchemy_url


def test_an_order_is_announced(outbox_postgres: Database) -> None:
    """The endpoint as a function, in a transaction that is never committed."""

    async def scenario() -> None:
        engine = create_async_engine(sqlalchemy_url(outbox_postgres.url, "asyncpg"))
        async with AsyncSession(engine) as session:
            await (await session.connection()).run_sync(Base.metadata.create_all)
            session.add(Article(name="tea", stock=10))
            placed = await place_order(NewOrder(article="tea", quantity=2), session)
            (event,) = await recorded_events_async(session)
            assert (event.event_type, event.aggregate_id) == ("OrderPlaced", str(placed["id"]))
            assert event.payload == {"article": "tea", "quantity": 2}
        await engine.dispose()

    asyncio.run(scenario())


def test_what_is_sold_out_is_not_announced(outbox_postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole application: the answer, and what it has committed."""
    monkeypatch.setenv("DATABASE_URL", sqlalchemy_url(outbox_postgres.url, "asyncpg"))
    with TestClient(app) as client:
        answer = client.post("/orders", json={"article": "tea", "quantity": 2})
        assert (answer.status_code, answer.json()) == (409, {"detail": "out of stock: tea"})
    with outbox_postgres.connect() as connection:
        assert connection.execute("SELECT count(*) FROM outbox.events").fetchone() == (0,)
