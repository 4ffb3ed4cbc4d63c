"""The provider of short-lived passwords is asked by the driver and by Spark's Python workers."""

from __future__ import annotations

import os

import pytest
from bench import Bench

from outbox._clients import credentials
from outbox.consumer import connections

pytestmark = pytest.mark.spark


def test_workers_ask_the_provider_too(bench: Bench, monkeypatch, tmp_path):
    notes = tmp_path / "notes"
    monkeypatch.setenv("TEST_NOTES", str(notes))
    monkeypatch.setitem(bench.spark.sparkContext.environment, "TEST_NOTES", str(notes))
    connections.close_all()
    credentials.use("credential_provider:noting")
    try:
        bench.send("a", 1)
        assert bench.once(driver_records=0).applied == 1
    finally:
        credentials.use(None)
        connections.close_all()
    asked = [line.split() for line in notes.read_text().splitlines()]
    assert {purpose for purpose, _ in asked} == {"postgres"}
    processes = {int(process) for _, process in asked}
    assert os.getpid() in processes
    assert len(processes) > 1
    assert credentials.VARIABLE not in bench.spark.sparkContext.environment
