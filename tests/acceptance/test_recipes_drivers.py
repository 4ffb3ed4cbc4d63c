"""examples/recipes: the drivers without a framework. An order and its event are both there, or neither is."""

from __future__ import annotations

import pytest
from recipes_support import shop

__all__ = ["shop"]


@pytest.mark.parametrize("recipe", ["plain_psycopg.py", "plain_asyncpg.py"])
def test_an_order_and_its_event_are_committed_together(shop, recipe):
    placed = [shop.run(recipe, "tea", quantity)[0].strip() for quantity in ("3", "2")]
    assert shop.run(recipe, "tea", "6", status=1) == ("", "out of stock: tea\n")
    assert shop.run(recipe, "gold", "1", status=1) == ("", "out of stock: gold\n")
    assert shop.orders() == [(placed[0], "tea", 3), (placed[1], "tea", 2)]
    events = [
        (placed[0], "OrderPlaced", {"article": "tea", "quantity": 3}),
        (placed[1], "OrderPlaced", {"article": "tea", "quantity": 2}),
    ]
    assert shop.written() == events
    assert shop.execute("SELECT name, stock FROM articles") == [("tea", 5)]
    shop.relay()
    assert sorted(shop.published(2)) == events
