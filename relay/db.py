"""Temporary: create_all until the migrations are here."""
import sqlalchemy as sa
from sqlalchemy import create_engine, MetaData
from outbox.tables import outbox_tables
from outbox.urls import sqlalchemy_url

def upgrade(url: str, schema: str = "outbox", lanes: int | None = None) -> None:
    engine = create_engine(sqlalchemy_url(url))
    meta = MetaData()
    t = outbox_tables(meta, schema, lanes or 4)
    with engine.begin() as c:
        c.execute(sa.schema.CreateSchema(schema, if_not_exists=True))
        meta.create_all(c)
        c.execute(t.lanes.insert(), [{"lane": i} for i in range(lanes or 4)])
    engine.dispose()
