"""``outbox relay run --workers``: what the workers get as their environment."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from typer.testing import CliRunner

from relay.cli.app import app
from relay.config import load
from relay.workers import be_worker

URL = "postgresql://relay@other/shop"


def test_an_option_takes_the_place_of_a_setting_from_a_file(monkeypatch, tmp_path):
    """Both of NAME and NAME_FILE would be refused by each worker."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "url").write_text("postgresql://relay@postgres/shop\n")
    monkeypatch.delenv("OUTBOX_DATABASE_URL", raising=False)
    monkeypatch.setenv("OUTBOX_DATABASE_URL_FILE", str(tmp_path / "url"))
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", "kafka:9092")
    given: list[Mapping[str, str]] = []

    def run_workers(_count: int, environment: Mapping[str, str]) -> int:
        given.append(environment)
        return 0

    monkeypatch.setattr("relay.workers.run_workers", run_workers)
    # The process's logging stays as it is.
    monkeypatch.setattr("outbox._app.logs.configure", lambda *_: None)
    for options in ([], ["--database-url", URL]):
        result = CliRunner().invoke(app, ["relay", "run", "--workers", "2", *options])
        assert result.exit_code == 0, result.output
    names = [{name for name in one if name.startswith("OUTBOX_DATABASE")} for one in given]
    assert names == [{"OUTBOX_DATABASE_URL_FILE"}, {"OUTBOX_DATABASE_URL"}]
    assert given[1]["OUTBOX_DATABASE_URL"] == URL
    assert given[1]["OUTBOX_KAFKA__BOOTSTRAP_SERVERS"] == "kafka:9092"


@pytest.mark.parametrize(("given", "used"), [("[::1]:9100", "[::1]:9102"), ("127.0.0.1:0", "127.0.0.1:0")])
def test_each_worker_has_a_port_of_its_own(monkeypatch, given: str, used: str):
    monkeypatch.setattr("threading.Thread.start", lambda _: None)
    settings = load(relay={"metrics_address": given, "instance": "a"})
    be_worker(2, settings)
    assert (settings.relay.metrics_address, settings.relay.instance) == (used, "a-2")
