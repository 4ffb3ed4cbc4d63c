"""examples/recipes: web services. What they answer with 201 is committed with its event, and nothing else is there."""

from __future__ import annotations

import signal

import pytest
from recipes_support import post, shop

from outbox.urls import sqlalchemy_url

__all__ = ["shop"]

FAIL_AT_COMMIT = """
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not today'; END $$;
CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail()
"""

SERVERS = {
    "fastapi_async": ("uvicorn", "--port", "0", "fastapi_async:app"),
    "flask_shop": ("flask", "--app", "flask_shop", "run", "--port", "0"),
}


@pytest.mark.parametrize(
    ("recipe", "driver", "refusal"),
    [
        ("fastapi_async", "asyncpg", {"detail": "out of stock: tea"}),
        ("flask_shop", "psycopg", {"error": "out of stock: tea"}),
    ],
)
def test_an_order_and_its_event_are_committed_together(shop, recipe, driver, refusal):
    service = shop.start("-m", *SERVERS[recipe], DATABASE_URL=sqlalchemy_url(shop.url, driver))
    address = service.logged(r"unning on (http://127\.0\.0\.1:\d+)")[1] + "/orders"
    shop.execute("INSERT INTO articles VALUES ('tea', 10)")
    placed = []
    for quantity in (3, 2):
        status, answer = post(address, {"article": "tea", "quantity": quantity})
        assert status == 201, service.text()
        placed.append((str(answer["id"]), quantity))
        # What was answered is committed.
        assert len(shop.orders()) == len(shop.written()) == len(placed)
    assert post(address, {"article": "tea", "quantity": 6}) == (409, refusal)
    shop.execute(FAIL_AT_COMMIT)
    assert post(address, {"article": "tea", "quantity": 1}) == (500, None)
    service.logged("not today")
    assert sorted(shop.orders()) == sorted((id_, "tea", quantity) for id_, quantity in placed)
    events = [(id_, "OrderPlaced", {"article": "tea", "quantity": quantity}) for id_, quantity in placed]
    assert shop.written() == events
    assert shop.execute("SELECT stock FROM articles") == [(5,)]
    shop.relay()
    assert sorted(shop.published(2)) == sorted(events)
    assert service.stop(signal.SIGTERM) == -signal.SIGTERM, service.text()


def test_the_recipe_of_a_test_passes(shop, outbox_postgres_server):
    """test_fastapi_async.py, in a process without our conftest; the fixture's server is there already."""
    options = ("-q", "-W", "error", "-p", "no:cacheprovider", "--rootdir", ".")
    printed, _ = shop.run(
        *("-m", "pytest", *options, "test_fastapi_async.py"), OUTBOX_TEST_DATABASE_URL=outbox_postgres_server.url()
    )
    assert "2 passed" in printed
