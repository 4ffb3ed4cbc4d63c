"""A relay that does not record its steps runs the plain source and publisher."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

import relay.protocol_trace
from outbox._app.settings import load
from outbox.errors import ConfigurationError
from relay.protocol_trace import VARIABLE, ProtocolTrace, TracedPublisher
from relay.wiring import build


def built(**more: Any) -> Any:
    values = {"database_url": "postgresql://127.0.0.1:1/x", "kafka": {"bootstrap.servers": "127.0.0.1:1"}}
    return build(load(**values, **more))._components


def test_without_the_variable_nothing_is_wrapped(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    plain = built()
    assert plain.source.__qualname__ == "_source.<locals>.new_source"
    assert plain.publisher.__qualname__ == "_publisher.<locals>.new_publisher"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "steps.jsonl"))
    assert built().publisher.func is TracedPublisher


@pytest.mark.parametrize("settings", [{"source": "wal"}, {"delivery": "at-most-once"}])
def test_what_the_check_does_not_cover_is_not_recorded(monkeypatch, tmp_path, settings):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "steps.jsonl"))
    with pytest.raises(ConfigurationError, match="OUTBOX_SOURCE=polling"):
        built(**settings)


@pytest.mark.parametrize("file", ["/dev/missing/steps.jsonl", "/dev/full"])
def test_a_file_that_can_not_be_written(monkeypatch, file):
    monkeypatch.setenv(VARIABLE, file)
    with pytest.raises(ConfigurationError, match=f"{VARIABLE} names '{file}', which can't be written: No s"):
        built()


@pytest.mark.parametrize("short", [False, True], ids=["full", "short"])
def test_a_trace_that_can_not_be_written_any_more_ends_and_the_relay_goes_on(monkeypatch, tmp_path, short):
    file = tmp_path / "steps.jsonl"
    trace = ProtocolTrace(str(file), "one", transactional=True, batch_size=1)
    trace.write("closed")

    def full(number: int, data: bytes) -> int:
        if not short:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(number, data[:5])

    with capture_logs() as said:
        with monkeypatch.context() as patched:
            patched.setattr(relay.protocol_trace, "os", SimpleNamespace(write=full))
            trace.write("closed")
        left = file.read_bytes()
        trace.write("closed")
    assert [(line["log_level"], line["file"]) for line in said] == [("warning", str(file))]
    # No step follows the one that is missing.
    assert file.read_bytes() == left
    assert left.count(b"\n") == 2
