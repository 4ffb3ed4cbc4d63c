"""Logs on a terminal: what others wrote must not affect it."""

from __future__ import annotations

import pytest
import structlog

from outbox._app import logs


@pytest.fixture
def configured(capsys):
    before = structlog.get_config()
    yield logs.configure
    structlog.configure(**before)


def test_what_others_wrote_is_escaped(configured, capsys):
    configured(style="console")
    log = structlog.get_logger("page")
    try:
        raise ValueError("key \x1b[2J\nsecond line \x9b31m")
    except ValueError:
        log.exception("a view failed", path="/\x1b]0;x\x07", shown="\u202etxt.exe")
    said = capsys.readouterr().err
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(said), said
    for text in (r"/\x1b]0;x\x07", r"\u202etxt.exe", "Traceback (most recent call last):\n", 'raise ValueError("key'):
        assert text in said
    assert said.endswith("ValueError: key \\x1b[2J\nsecond line \\x9b31m\n")
