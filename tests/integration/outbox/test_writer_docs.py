"""docs/guides/writing-events.md does what it says: its examples run, in their order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import schema_registry
from writer_targets import stored

from outbox import models
from relay.config import load
from relay.operations.asyncapi import document

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "writing-events.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_examples_run(outbox_postgres, capsys, monkeypatch):
    monkeypatch.setattr(models, "_registered", {})
    with schema_registry.running() as registry:
        run(outbox_postgres, registry.url)
    printed = capsys.readouterr().out
    assert "autocommit" in printed
    described = document(models.registered(), load(), "Shop", "1.0.0")["components"]
    assert sorted(described["messages"]) == ["Order.OrderForgotten", "Order.OrderPlaced"]
    assert described["schemas"]["Order.OrderPlaced"]["required"] == ["total"]


def run(outbox_postgres, registry_url: str) -> None:
    text = PAGE.read_text()
    blocks = [(text[: found.start()].count("\n") + 2, *found.groups()) for found in BLOCK.finditer(text)]
    assert [language for _, language, _ in blocks].count("python") == 15
    # Dataclasses and mapped classes look their module up.
    namespace = {"url": outbox_postgres.url, "registry_url": registry_url, "__name__": __name__}
    try:
        for line, language, code in blocks:
            if language == "python":
                exec(compile("\n" * (line - 1) + code, PAGE, "exec", dont_inherit=True), namespace)
            elif language == "sh":  # tests/unit/docs/test_blocks.py looks at the commands
                assert code.startswith("outbox asyncapi ")
            else:
                assert language == "sql"
                with outbox_postgres.connect() as connection:
                    connection.execute(code)
    finally:
        if "engine" in namespace:
            namespace["engine"].dispose()
    rows = [(row["aggregate_type"], row["aggregate_id"], row["event_type"]) for row in stored(outbox_postgres)]
    assert rows == [
        ("Order", "4711", "OrderPlaced"),
        ("Order", "4711", "OrderPaid"),
        ("Order", "4711", "OrderChanged"),
        ("Order", "4712", "OrderPlaced"),
        ("Order", "4712", "OrderPaid"),
        ("Order", "4712", "OrderPacked"),
        ("Order", "4713", "OrderPlaced"),
        *[("Order", str(n), "OrderPlaced") for n in range(1000)],
        ("Payment", "4711", "PaymentReceived"),
        ("Order", "4711", "OrderSent"),
        ("Invoice", "17", "InvoiceIssued"),
        ("Stock", "tea", "Counted"),
        ("Order", "customer-7", "OrderPacked"),
    ]
    assert (namespace["moved"], namespace["cancelled"]) == (True, True)
