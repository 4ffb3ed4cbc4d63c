"""``outbox demo`` itself, as a newcomer runs it, on a small shop."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from relay.cli.demo.ledger import Reconciliation


@pytest.mark.spark
def test_the_demo_survives_its_own_kills_and_comes_out_clean(outbox_postgres_server, outbox_kafka):
    url = outbox_postgres_server.url("postgres")
    environment = os.environ | {
        "OUTBOX_DATABASE_URL": url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
    }
    done = subprocess.run(
        [sys.executable, "-m", "relay.cli", "demo", "--events", "3000", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["clean"] is True
    assert result["committed"] == result["applied"] >= 3000
    assert result["published"] >= result["committed"]
    assert "kill -9 relay" in done.stderr
    assert "kill -9 spark" in done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"applied": 9, "lost": 1},
        {"applied": 11, "applied_twice": 1},
        {"out_of_order": 1},
        {"published": 9},
        {"differing_orders": 1},
        {"phantom_orders": 1},
        {"lost": 1, "applied_twice": 1},
    ],
)
def test_anything_off_is_not_clean(changes):
    good = {
        "committed": 10,
        "published": 10,
        "applied": 10,
        "lost": 0,
        "applied_twice": 0,
        "out_of_order": 0,
        "differing_orders": 0,
        "phantom_orders": 0,
    }
    assert Reconciliation(**good).clean
    assert not Reconciliation(**good | changes).clean
