"""``outbox web``: the databases that it shows."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from relay.cli.app import app
from relay.config import Settings

SETTING, OPTION = "postgresql://page@sink/shop", "postgresql://page@other/shop"


@pytest.mark.parametrize(
    ("setting", "options", "expected"),
    [(None, [], None), (SETTING, [], SETTING), (SETTING, ["--sink-url", OPTION], OPTION)],
    ids=["neither", "setting", "option"],
)
def test_the_consumers_database(setting, options, expected, monkeypatch, tmp_path):
    """The setting may come from a file; options are seen by all users of the machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTBOX_DATABASE_URL", "postgresql://page@postgres/shop")
    monkeypatch.delenv("OUTBOX_RELAY__SINK_URL", raising=False)
    if setting is not None:
        (tmp_path / "sink-url").write_text(setting + "\n")
        monkeypatch.setenv("OUTBOX_RELAY__SINK_URL_FILE", str(tmp_path / "sink-url"))
    given = []

    class Server:
        def __init__(self, settings: Settings) -> None:
            given.append(settings.relay.sink_url)

        def run(self, announce: object) -> None: ...

    monkeypatch.setattr("relay.page.server.PageServer", Server)
    # The process's logging stays as it is.
    monkeypatch.setattr("outbox._app.logs.configure", lambda *_: None)
    result = CliRunner().invoke(app, ["web", *options])
    assert result.exit_code == 0, result.output
    assert given == [expected]
