"""Whatever text stands in a variable or in the file, there are settings, or one line that says what is wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import without_settings
from typer.testing import CliRunner

from outbox._app import environment
from outbox.errors import ConfigurationError
from relay.cli.app import app
from relay.config import Settings, load

__all__ = ["without_settings"]

# What an environment can hold: no NUL, no lone surrogates.
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    [
        "{}",
        "[]",
        "null",
        "1e999",
        "NaN",
        "-0",
        "٣",
        '{"a": {"b": 1}}',
        "true",
        "1_0",
        "\x1b[31m",
        "postgresql://[",
        "[bold]",
    ]
)
PATHS = [*sorted(environment.setting_names(Settings)), ("kafka", "linger.ms"), ("routes", "order", "topic")]


def problem() -> str | None:
    """Return what is wrong with the settings; None if nothing is. Raises every other error."""
    try:
        load()
    except ConfigurationError as error:
        return str(error)
    return None


@settings(max_examples=50)
@given(path=st.sampled_from(PATHS), text=TEXTS)
def test_any_text_in_a_variable(path, text):
    if path == ("credentials",):
        # It is imported.
        text = text.replace(":", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(environment.variable(path), text)
        error = problem()
        if error is not None:
            assert environment.variable(path) in error
            # As a command shows it: one line, with nothing for the terminal.
            done = CliRunner().invoke(app, ["status"])
            assert (done.exit_code, type(done.exception)) == (2, SystemExit)
            assert done.stderr.replace("\n", "").isprintable()


@given(path=st.sampled_from(PATHS), text=TEXTS)
def test_any_text_in_the_file(path, text, tmp_path_factory):
    *sections, last = path
    if path == ("credentials",):
        text = text.replace(":", "")
    table = f"[{'.'.join(sections)}]\n" if sections else ""
    file = tmp_path_factory.getbasetemp() / "any.toml"
    # A string of JSON is one of TOML, but for the character that TOML does not allow.
    value = json.dumps(text, ensure_ascii=True).replace("\x7f", "\\u007f")
    if any(ord(char) > 0xFFFF for char in text):
        value = json.dumps(text.encode("ascii", "replace").decode()).replace("\x7f", "\\u007f")
    file.write_text(f'{table}"{last}" = {value}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTBOX_CONFIG", str(file))
        error = problem()
        assert error is None or last in error.lower()
