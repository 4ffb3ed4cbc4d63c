"""A relay that does not record its steps runs the plain source and publisher."""

from __future__ import annotations

from typing import Any

import pytest

from outbox._app.settings import load
from outbox.errors import ConfigurationError
from relay.protocol_trace import VARIABLE, TracedPublisher
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


def test_a_file_that_can_not_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "missing" / "steps.jsonl"))
    with pytest.raises(ConfigurationError, match="can't be written: No such file"):
        built()
