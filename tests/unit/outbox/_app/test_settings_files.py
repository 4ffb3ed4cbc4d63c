"""Settings whose values are in files of their own (``OUTBOX_…_FILE``), and secrets that no error shows."""

from __future__ import annotations

import os
import pwd
import string
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import without_settings
from typer.testing import CliRunner

from outbox._clients import credentials
from outbox.errors import ConfigurationError
from relay.cli.app import app
from relay.config import load

__all__ = ["without_settings"]


def secret(tmp_path: Path, content: bytes | str) -> str:
    file = tmp_path / "secret"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("pa ss", "pa ss"),
        ("pass\n", "pass"),
        ("pass\r\n", "pass"),
        ("pass\n\n", "pass\n"),
        (" p\nä ", " p\nä "),
        ("", ""),
    ],
)
def test_a_file_has_the_value_without_one_newline_at_its_end(monkeypatch, tmp_path, content, value):
    monkeypatch.setenv("OUTBOX_KAFKA__SASL_PASSWORD_FILE", secret(tmp_path, content))
    assert load().kafka == {"sasl.password": value}


@pytest.mark.parametrize("option", ["file", "jwt.template.file", "private.key.file"])
def test_an_option_of_kafka_that_names_a_file_is_not_read_from_it(monkeypatch, tmp_path, option):
    option = f"sasl.oauthbearer.assertion.{option}"
    name = f"OUTBOX_KAFKA__{option.replace('.', '_').upper()}"
    monkeypatch.setenv(name, "/run/secrets/key.pem")
    assert load().kafka == {option: "/run/secrets/key.pem"}
    monkeypatch.delenv(name)
    monkeypatch.setenv(f"{name}_FILE", secret(tmp_path, "/run/secrets/key.pem\n"))
    assert load().kafka == {option: "/run/secrets/key.pem"}


@pytest.mark.parametrize("spelled", [str.upper, str.lower])
def test_any_setting_may_come_from_a_file(monkeypatch, tmp_path, spelled):
    values = {
        "DATABASE_URL": "postgresql://u:p%40@h/db",
        "RELAY__BATCH_SIZE": "17",
        "ROUTES": '{"Order": "orders"}',
        "SCHEMA": "shop",
        "KAFKA__BOOTSTRAP_SERVERS": "h:1",
    }
    for name, value in values.items():
        file = tmp_path / name
        file.write_text(value + "\n")
        monkeypatch.setenv(spelled(f"OUTBOX_{name}_FILE"), str(file))
    settings = load()
    assert settings.database_url == values["DATABASE_URL"]
    assert (settings.relay.batch_size, settings.db_schema, settings.kafka) == (17, "shop", {"bootstrap.servers": "h:1"})
    assert (settings.routes or {})["Order"].topic == "orders"
    assert load(database_url="postgresql://other/db").database_url == "postgresql://other/db"


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        (
            {"OUTBOX_DATABASE_URL_FILE": "secret", "OUTBOX_DATABASE_URL": "postgresql://h/db"},
            "OUTBOX_DATABASE_URL and OUTBOX_DATABASE_URL_FILE are the same setting: unset one of them",
        ),
        (
            {"outbox_schema_file": "secret", "OUTBOX_SCHEMA": "x"},
            "OUTBOX_SCHEMA and outbox_schema_file are the same setting: unset one of them",
        ),
        (
            {"OUTBOX_KAFKA__SASL_PASSWORD_FILE": "nowhere"},
            "OUTBOX_KAFKA__SASL_PASSWORD_FILE names the file 'nowhere', which can't be read: No such file or directory",
        ),
        (
            {"OUTBOX_SCHEMA_FILE": "binary"},
            "OUTBOX_SCHEMA_FILE names the file 'binary', which can't be read: it is not",
        ),
        (
            {"OUTBOX_KAFKA_SASL_PASSWORD_FILE": "secret"},
            "OUTBOX_KAFKA_SASL_PASSWORD_FILE is not a setting: did you mean OUTBOX_KAFKA__SASL_PASSWORD_FILE?",
        ),
        ({"OUTBOX_DATABASE_URL_FILE": "secret"}, "OUTBOX_DATABASE_URL_FILE: the database URL must look like"),
        ({"OUTBOX_ROUTES_FILE": "secret"}, "OUTBOX_ROUTES_FILE must be a JSON object"),
    ],
)
def test_a_mistake_names_the_variable_as_it_was_written(monkeypatch, tmp_path, variables, problem):
    secret(tmp_path, "tops3cret\n")
    (tmp_path / "binary").write_bytes(b"tops3cret\xff")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["relay", "run"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert done.stderr.startswith(f"outbox: {problem}"), done.stderr
    assert "tops3cret" not in done.stderr


# Characters that mean something in an address, in JSON and in TOML.
PASSWORDS = st.text("#?/@%:&=,'\\ []{}\"+" + string.ascii_lowercase[:4] + "7ä", min_size=6, max_size=16)
PLACES = {
    "OUTBOX_DATABASE_URL raw": ("OUTBOX_DATABASE_URL", lambda p: f"postgresql://u:{p}@h:x/db"),
    "OUTBOX_DATABASE_URL encoded": ("OUTBOX_DATABASE_URL", lambda p: f"postgresql://u:{quote(p, safe='')}@h:x/db"),
    "OUTBOX_DATABASE_URL words": ("OUTBOX_DATABASE_URL", lambda p: f"host=h password={p} nonsense"),
    "OUTBOX_KAFKA": ("OUTBOX_KAFKA", lambda p: f'{{"sasl.password": ["{p}"]}}'),
    "OUTBOX_SPARK__CONF": ("OUTBOX_SPARK__CONF", lambda p: f'{{"spark.secret": [{p}]}}'),
    "an unknown one": ("OUTBOX_SASL_PASSWORD", lambda p: p),
    "a file": ("outbox.toml", lambda p: f"database_url = 'postgresql://u:{p}@h:x/db'"),
    "a broken file": ("outbox.toml", lambda p: f"database_url = 'postgresql://u:{p}@h/db"),
}


def everything(error: BaseException | None) -> Iterator[str]:
    """Return what a caller could print of an error and of those that it is chained to, hidden ones among them."""
    if error is not None:
        yield f"{error!s}\n{error!r}\n" + "".join(traceback.format_exception(error))
        yield from everything(error.__cause__)
        yield from everything(error.__context__)


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=40)
@given(password=PASSWORDS)
@example(password="pa/ss?#[")
@example(password="'''\nab")
def test_no_error_of_the_settings_has_a_part_of_a_password(place, password, tmp_path_factory):
    """Where the password is wrong by itself the text is the same for another: nothing of it is there."""
    name, spelled = PLACES[place]

    def problem(secret: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.getbasetemp())
            if name.endswith(".toml"):
                file = tmp_path_factory.mktemp("settings") / "outbox.toml"
                file.write_text(spelled(secret))
                patch.setenv("OUTBOX_CONFIG", str(file))
            else:
                patch.setenv(name, spelled(secret))
            try:
                load()
            except ConfigurationError as error:
                return "".join(everything(error))
            return ""

    text = problem(password)
    # Four characters of it in a row are a part of it.
    parts = {password[start : start + 5] for start in range(len(password) - 4)}
    constant = problem("z" * len(password))
    assert [part for part in parts if part in text and part not in constant] == []


def test_a_provider_that_is_refused_leaves_the_former_one():
    former = credentials.chosen()
    with pytest.raises(ConfigurationError, match="nowhere"):
        credentials.use("nowhere:function")
    assert credentials.chosen() == former


@pytest.mark.parametrize(
    ("mode", "owner", "members", "problem"),
    [
        (0o646, None, [], "others may change it"),
        (0o664, None, ["neighbour"], "others may change it"),
        (0o664, None, None, "others may change it"),
        (0o664, None, [], None),
        (0o644, 12_345, [], "it belongs to another user"),
        (0o600, None, [], None),
        (0o644, 0, [], None),
    ],
)
def test_a_file_of_the_working_directory_is_read_only_when_it_can_be_trusted(
    monkeypatch, tmp_path, mode, owner, members, problem
):
    """Its ``credentials`` names a module: who writes it runs code."""
    # The group of the user's name has these members; None: the file's group is another one.
    me = pwd.getpwuid(os.geteuid()).pw_name
    group = SimpleNamespace(gr_name="staff" if members is None else me, gr_mem=members or [])
    monkeypatch.setattr("grp.getgrgid", lambda _number: group)
    (tmp_path / "planted.py").write_text("raise SystemExit('planted code was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "outbox.toml"
    file.write_text('schema = "planted"\n' if problem is None else 'credentials = "planted:run"\n')
    file.chmod(mode)
    if owner is not None:
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(file, owner, -1)
    if problem is None:
        assert load().db_schema == "planted"
        return
    with pytest.raises(ConfigurationError, match=problem) as caught:
        load()
    assert str(caught.value) == (
        f"outbox.toml in the working directory is not read, as {problem}, and settings run code: chown it to yourself "
        "and chmod go-w, or name it in OUTBOX_CONFIG if you trust it"
    )
    # A file that is named is trusted.
    file.write_text('schema = "named"\n')
    monkeypatch.setenv("OUTBOX_CONFIG", "outbox.toml")
    assert load().db_schema == "named"
