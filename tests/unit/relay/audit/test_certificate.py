"""A certificate that can't be written: the audit is not made for nothing, and an earlier certificate is kept."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outbox.errors import ConfigurationError
from relay.audit.certificate import _replace
from relay.cli.app import app


@pytest.mark.parametrize("name", ["missing/certificate", "."])
def test_what_can_not_be_written_is_known_before_the_audit(tmp_path, name):
    """No server answers: the audit would fail, with another status."""
    options = ["--certificate", str(tmp_path / name), "--database-url", "postgresql://u@127.0.0.1:1/shop"]
    result = CliRunner().invoke(app, ["audit", *options], env={"OUTBOX_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"})
    assert isinstance(result.exception, SystemExit | ConfigurationError), result.exception
    assert "no certificate can be written to" in f"{result.output}{result.exception}"


def test_a_certificate_is_replaced_as_a_whole(tmp_path):
    file = tmp_path / "certificate"
    for contents in (b"first", b"second"):
        _replace(file, contents)
        assert file.read_bytes() == contents
    assert [one.name for one in tmp_path.iterdir()] == ["certificate"]


def test_an_error_leaves_the_former_one_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "certificate"
    file.write_bytes(b"first")

    def full(path: Path, _: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigurationError, match="No space left"):
        _replace(file, b"second")
    assert (file.read_bytes(), [one.name for one in tmp_path.iterdir()]) == (b"first", ["certificate"])


def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    _replace(pipe, b"first")
    reader.join(30)
    assert read == [b"first"]
