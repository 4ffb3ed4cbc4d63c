"""The reference pages say what the code says: each is what their generator writes now."""

from __future__ import annotations

import re

import pytest
from docs_support import DOCS, generator
from typer.testing import CliRunner

from outbox._app import environment
from outbox.consumer.admin.dead_letters import REASONS
from outbox.consumer.model import LossKind
from outbox.errors import OutboxError
from relay.cli.app import app
from relay.config import Settings
from relay.operations.roles import RoleKind


@pytest.mark.parametrize("name", generator.PAGES)
def test_a_page_is_what_the_code_says(name):
    committed = (DOCS / "reference" / name).read_text()
    assert committed == generator.PAGES[name](), f"run `{generator.COMMAND}` and commit docs/reference/{name}"


def test_help_fills_the_width_of_the_terminal():
    """A line end of a docstring is none in the terminal: typer would keep it in all paragraphs but the first."""
    shown = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(app, ["relay", "pause", "--help"]).output
    assert "Exit status 1 if a relay does not confirm in time; the pause stays." in shown


def test_the_help_of_roles_names_every_kind():
    shown = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(app, ["db", "roles", "--help"]).output
    named = re.search(r"Kinds: ([^.]+)\.", shown)
    assert sorted(re.findall(r"[\w-]+", named[1].replace("in the consumers' schema", ""))) == sorted(RoleKind)


def test_every_setting_is_on_its_page():
    page = generator.settings_page()
    sections = {name for name, field in Settings.model_fields.items() if environment.model_of(field.annotation)}
    paths = [path for path in environment.setting_names(Settings) if len(path) > 1 or path[0] not in sections]
    assert len(paths) > 40
    assert [path for path in paths if f"| `{environment.variable(path)}` |" not in page] == []


def test_every_error_is_on_its_page():
    page = generator.errors_page()

    def below(error):
        return {error}.union(*map(below, error.__subclasses__()))

    names = {
        error.__name__ for error in below(OutboxError) if error.__module__.startswith(("outbox", "relay", "spark"))
    }
    assert {"EventTooLarge", "LaneLost", "Fenced", "StartFailed"} <= names
    assert [name for name in sorted(names) if not re.search(rf"^- `{name}`(?: \(|:)", page, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("page", "codes"), [("dead-letters.md", set(REASONS)), ("offsets.md", {kind.value for kind in LossKind})]
)
def test_operators_find_each_code(page, codes):
    """The tables that say what to do about a code have all of them, and no other."""
    text = (DOCS / "operations" / page).read_text()
    tables = re.findall(r"^\| (?:reason|kind) \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert [set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) for table in tables] == [codes]


def test_what_is_not_described_in_the_code_is_refused():
    class Section(Settings):
        mute: int = 1

    with pytest.raises(generator.Undocumented, match="mute"):
        list(generator._fields(Section))
