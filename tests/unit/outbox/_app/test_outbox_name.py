"""The name of an outbox in its metrics and its log."""

from __future__ import annotations

import json
import threading
import urllib.request

import pytest
import structlog
from prometheus_client import CollectorRegistry, Counter
from typer.testing import CliRunner

from outbox._app import logs
from outbox._app.prometheus import serve
from outbox._app.settings import load
from outbox.errors import ConfigurationError
from outbox.sandbox._ports import free_ports
from relay.cli.app import app
from spark_jobs.driver.options import options_of


def test_it_is_a_label_of_every_metric_also_of_those_that_are_asked_for_by_name():
    registry = CollectorRegistry()
    Counter("a", "", ["result"], registry=registry).labels("sent").inc()
    Counter("b", "", registry=registry).inc(2)
    (port,) = free_ports(1)
    serve(f"127.0.0.1:{port}", registry, outbox="orders")

    def shown(query: str) -> set[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics{query}", timeout=30) as answer:
            return {line for line in answer.read().decode().splitlines() if not line.startswith("#")}

    of_b = 'b_total{outbox="orders"} 2.0'
    # As often as it is asked.
    for _ in range(2):
        assert shown("") == {'a_total{outbox="orders",result="sent"} 1.0', of_b}
    assert shown("?name[]=b_total") == {of_b}


def test_it_is_in_the_entries_of_every_thread(capsys, monkeypatch):
    before = structlog.get_config()
    try:
        logs.configure("info", "json", "orders")
        thread = threading.Thread(target=lambda: structlog.get_logger("relay").info("hello", lane=3))
        thread.start()
        thread.join()
        logs.configure("info", "json")
        structlog.get_logger("relay").info("hello")
    finally:
        structlog.configure(**before)
    named, unnamed = map(json.loads, capsys.readouterr().err.splitlines())
    assert (named["outbox"], named["event"], named["lane"]) == ("orders", "hello", 3)
    assert "outbox" not in unnamed


@pytest.mark.parametrize("command", ["relay run", "web", "consume m:j --once", "external run m:e", "audit --follow"])
def test_every_command_that_logs_has_it_in_its_entries(monkeypatch, command):
    named: list[str | None] = []

    def configure(_level: str, _style: str, outbox: str | None = None) -> None:
        named.append(outbox)
        raise ConfigurationError("far enough")

    monkeypatch.setattr(logs, "configure", configure)
    environment = {"OUTBOX_NAME": "orders", "OUTBOX_DATABASE_URL": "postgresql://127.0.0.1:1/x"}
    done = CliRunner().invoke(app, command.split(), env=environment)
    assert named == ["orders"], done.output


def test_a_job_has_it_for_its_spans(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTBOX_NAME", raising=False)
    kafka = {"bootstrap.servers": "127.0.0.1:1"}
    for given in ({"name": "orders"}, {}):
        settings = load(kafka=kafka, **given)
        assert options_of(settings, "postgresql://127.0.0.1:1/x", 1).outbox == given.get("name")


def test_a_name_is_given_or_it_is_not(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTBOX_NAME", raising=False)
    assert (load().name, load().given_name) == ("outbox", None)
    monkeypatch.setenv("OUTBOX_NAME", "outbox")
    assert load().given_name == "outbox"
    monkeypatch.delenv("OUTBOX_NAME")
    (tmp_path / "outbox.toml").write_text('name = "orders"')
    assert load().given_name == "orders"
