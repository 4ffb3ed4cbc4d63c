"""Write the reference pages of settings, commands, metrics, errors and roles from the code: ``make docs-reference``.

``tests/unit/docs/test_reference.py`` fails while a page in the repository differs from what this writes.
"""

from __future__ import annotations

import ast
import datetime as dt
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
import typer
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.core import TyperGroup

import outbox
import relay
import spark_jobs
from outbox._app import environment
from outbox._app.settings import RouteSettings, Settings
from outbox._app.settings_errors import expected
from outbox._clients.clock import DatabaseClock
from outbox.consumer.admin.status import GroupCounts
from outbox.consumer.model import OffsetBounds, Partition
from outbox.consumer.tables import consumer_tables
from outbox.errors import OutboxError
from outbox.inbox.errors import Reject as InboxReject
from outbox.tables import outbox_tables
from relay.cli.assembly import assemble
from relay.core.health import Health, Reason
from relay.core.reports import TurnMetrics
from relay.insights import OutboxState, Verified
from relay.kafka.routing import Router
from relay.metrics.delays import PublishDelays
from relay.metrics.groups import MOST, GroupLags, count_metrics, group_metrics
from relay.metrics.outbox import outbox_metrics
from relay.metrics.relay import RelayMetrics, build_info, slot_metrics, slot_repairs
from relay.metrics.storage import Storage, storage_metrics
from relay.operations.roles import COLUMNS, TABLES, RoleKind
from relay.sizes import Disk
from relay.wal.slot import SlotState
from spark_jobs.errors import Reject
from spark_jobs.metrics import ConsumerMetrics

HERE: Final = Path(__file__).parent
COMMAND: Final = "make docs-reference"
_NOTE: Final = f"<!-- Written by `{COMMAND}` from the code. Change it there. -->\n"
_GROUP: Final = "g"


class Undocumented(Exception):
    """Something that a page must show is not described in the code."""


# Settings


def settings_page() -> str:
    """Return the page of all settings: names, values, defaults, meanings."""
    sections = {
        name: model
        for name, field in environment.fields_of(Settings).items()
        if (model := environment.model_of(field)) is not None
    }
    tables = [_setting_rows(Settings, (), leave_out=sections)]
    for name, model in sections.items():
        tables.append(f"## `[{name}]`\n\n{_paragraph(model)}\n\n{_setting_rows(model, (name,))}")
    rows = [[f"`{field}`", _values(info), _default(info), text] for field, info, text in _fields(RouteSettings)]
    routes = _table(["", "value", "default", ""], rows)
    others = _list(environment.READ_ELSEWHERE.items())
    return _page(
        "Settings",
        """
        A command's option takes precedence over the environment, which takes precedence over a TOML file:
        `outbox.toml` in the working directory, or what `OUTBOX_CONFIG` names. As settings run code, a file in the
        working directory is refused unless it belongs to you or to root, and no other user can write it.
        `OUTBOX_RELAY__BATCH_SIZE=500` in the environment is `batch_size = 500` under `[relay]` in the file, and
        [`OUTBOX_…_FILE`](../operations/secrets.md) names a file that holds the value. An unknown name in either is an
        error (exit status 2) that suggests the nearest one. Times are in seconds.

        Consumers use `[consumer]`, `[spark]` and the settings above `OUTBOX_SCHEMA`; the others are the relay's. Every
        command checks all of them.
        """,
        *tables,
        "## Routes\n\n`routes` names the topic of each aggregate type, as text or as a table with these keys:\n\n"
        + routes,
        "## Other variables\n\nThese are not settings: only the environment can have them.\n\n" + others,
    )


def _setting_rows(model: type[BaseModel], path: tuple[str, ...], leave_out: Iterable[str] = ()) -> str:
    rows = [
        [f"`{environment.variable((*path, name))}`", _values(field), _default(field), text]
        for name, field, text in _fields(model)
        if name not in leave_out
    ]
    return _table(["variable", "value", "default", ""], rows)


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, str]]:
    """Yield each field's name as users spell it, the field, and the docstring that stands below it."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base.__module__.partition(".")[0] in {"outbox", "relay", "spark_jobs"}:
            texts |= _attributes(base)
    spelled = environment.fields_of(model)
    for name, (given, field) in zip(model.model_fields, spelled.items(), strict=True):
        if name not in texts and environment.model_of(field) is None:
            raise Undocumented(f"{model.__name__}.{name} has no docstring below it")
        yield given, field, texts.get(name, "")


def _values(field: FieldInfo) -> str:
    if environment.values_of(field.annotation) is str:
        return "options by name"
    text = expected(field).removeprefix("a ").replace("whole number", "integer")
    return re.sub(r"^(integer|number|text) (?:from|of) (\S+) to (\S+)", r"\1, \2–\3", text)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "(required)"
    if value is None or value in ({}, ""):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"`{value.value if isinstance(value, Enum) else value}`"


# Commands


_MANY: Final = 2
"""An option with the same text in this many commands is described once."""
_DATABASE: Final = "OUTBOX_DATABASE_URL"
"""The help of ``--database-url``; commands on consumers put "The sink's database;" before it."""
_REQUIRED: Final = " [required]"


def cli_page() -> str:
    """Return the page of all commands: usage, arguments, options."""
    root = typer.main.get_command(assemble())
    commands = list(_commands(root, typer.Context(root, info_name="outbox"), "outbox"))
    options = Counter((name, text.removesuffix(_REQUIRED)) for _, _, _, rows in commands for name, text in rows)
    # Of several texts for one name, the most frequent.
    often = {
        name: text
        for (name, text), count in reversed(options.most_common())
        if count >= _MANY and name.startswith("--")
    }
    shared = list(reversed(often.items()))
    without = [
        f"`{path.removeprefix('outbox ')}`"
        for path, _, _, rows in commands[1:]
        if not any(text == _DATABASE for _, text in rows)
    ]
    everywhere = f"Every command has it but {', '.join(without)}."
    return _page(
        "Commands",
        """
        `--help` after a command shows the same. An option that names a variable overrides that
        [setting](settings.md). See also [errors and exit statuses](errors.md).
        """,
        "Options of several commands. Below, each command lists only their names, and never `--database-url`:",
        _list(
            (name, f"{text}; for commands on consumers, the sink's. {everywhere}" if text == _DATABASE else text)
            for name, text in shared
        ),
        *(_command(path, text, usage, rows, shared) for path, text, usage, rows in commands),
    )


def _commands(command: Any, context: typer.Context, path: str) -> Iterator[tuple[str, str, str, list[tuple[str, str]]]]:
    """Yield each command: its path, its help, its usage, and its arguments and options."""
    group = isinstance(command, TyperGroup)
    if not group or path == "outbox" or command.invoke_without_command:
        text = "" if path == "outbox" else _help(command.help, path)
        usage = " ".join(command.collect_usage_pieces(context))
        yield path, text, usage, list(_parameters(command, context, path))
    if group:
        for name, child in command.commands.items():
            below = typer.Context(child, info_name=name, parent=context)
            yield from _commands(child, below, f"{path} {name}")


def _command(
    path: str, text: str, usage: str, rows: Sequence[tuple[str, str]], shared: Sequence[tuple[str, str]]
) -> str:
    arguments = usage.removeprefix("[OPTIONS]").strip()
    shown = f" `{arguments}`" if arguments and "COMMAND" not in arguments else ""
    parts = [f"## {path}{shown}", text]
    own, others = [], []
    for name, described in rows:
        if described == _DATABASE:
            continue
        if (name, described.removesuffix(_REQUIRED)) in shared:
            # Without the type of its value.
            others.append(f"`{name.partition(' ')[0]}`" + (" (required)" if described.endswith(_REQUIRED) else ""))
        else:
            own.append((name, described))
    parts.append(_list(own) + (f"\n- {', '.join(others)}" if others else ""))
    return "\n\n".join(part.strip() for part in parts if part)


def _list(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- `{name}`: {text}" for name, text in rows)


def _parameters(command: Any, context: typer.Context, path: str) -> Iterator[tuple[str, str]]:
    for each in command.params:
        if getattr(each, "hidden", False):
            continue
        record = each.get_help_record(context)
        if record is None or record[1].startswith("["):
            raise Undocumented(f"{path}: {each.name} has no help")
        name, text = record
        # Of types only numbers, dates and choices; the text says whether an option is repeatable.
        name = re.sub(r" <(str|list\[\w+\])>$", "", name).replace(" range>", ">")
        # That a number is not negative needs no words.
        text = re.sub(r"; x>=[01](?:\.0)?(?=\])| \[x>=[01](?:\.0)?\]", "", _markdown(text))
        if not name.startswith("--"):  # Usage shows it.
            text = text.removesuffix(_REQUIRED).replace("; required]", "]")
        yield name, _DATABASE if text.endswith(f"; {_DATABASE}") else text


def _help(text: str | None, path: str) -> str:
    if not text:
        raise Undocumented(f"{path} has no help")
    return "\n\n".join(textwrap.fill(part, 116) for part in text.split("\n\n"))


# Metrics


def metrics_page() -> str:
    """Return the page of all metrics of relays and consumers: names, types, labels, meanings."""
    relays = RelayMetrics(lambda: Health(True, 1, (), {"slot": 0.0}))
    slot = slot_metrics(SlotState(**dict.fromkeys(SlotState._fields, 0)), 1, 0.0, healthy=True)
    turns, repairs, build = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    build_info(build, "1", "d", "s")
    PublishDelays(turns, DatabaseClock(), Router())
    TurnMetrics(turns)
    slot_repairs(repairs)
    now = dt.datetime.now(dt.UTC)
    verified = Verified("t", now, 0, 0, 0, 0, now, ())
    outbox = OutboxState(now, 0, True, True, None, 0, 0, 0, 0, 0, (), (), None, scheduled=0, verified=[verified])
    reasons = [(reason.value, text) for reason, text in members(Reason)]
    return _page(
        "Metrics",
        """
        A relay serves its metrics at `OUTBOX_RELAY__METRICS_ADDRESS`, `outbox consume` at
        `OUTBOX_CONSUMER__METRICS_ADDRESS`. Each also has the label `outbox`, which is `OUTBOX_NAME` (on a consumer only
        if that is set). Names that end in `_total` are counters; the others are gauges, unless marked. What
        to watch: [the relay](../operations/relay.md#what-to-watch), [the slot](../operations/wal.md#what-to-watch),
        [consumers](../operations/dead-letters.md#watch).
        """,
        "## Relays\n\n"
        + _metrics([*relays.collect(), *build.collect()])
        + "\n\nThe tasks of `outbox_relay_upkeep_wait_seconds` are in [the "
        "runbook](../operations/runbooks.md#upkeep-fails)."
        + "\n\nWhat a process has done since it started:\n\n"
        + _metrics(turns.collect()),
        "## The outbox\n\nShown by the relay that holds the first lane, so that a sum over relays is right.\n\n"
        + _metrics(outbox_metrics(outbox, {}, 1)),
        "### Storage\n\nShown by the same relay, of both schemas, read once a minute.\n\n"
        + _metrics(storage_metrics(Storage(Disk(0, 0, 0), {}))),
        "### Consumer groups\n\nShown by the same relay, of the groups in the outbox's database or in "
        f"`OUTBOX_RELAY__SINK_URL`: the {MOST} highest values of each. Kafka-to-kafka keeps its offsets in Kafka.\n\n"
        + _metrics(
            [*group_metrics(GroupLags({}, {}, {}, {})), *count_metrics(GroupCounts({}, {}, {}, {}, {}, {}, {}))]
        ),
        "### Reasons\n\nValues of the label `reason`: what the lanes wait for.\n\n" + _list(reasons),
        "## The replication slot\n\nEvery relay shows these: one that polls, once a slot is set up.\n\n"
        + _metrics([*slot, *repairs.collect()]),
        "## Consumers\n\n" + _metrics(_Sample().collect()),
    )


class _Sample(ConsumerMetrics):
    """The collector of a group with one partition whose servers have answered."""

    def __init__(self) -> None:
        super().__init__(_GROUP, ["t"], "", "", {})
        self.observe("round", {"round_seconds": 1.0, "read": 1})

    def _query_sink(self) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        row = _Ones(topic="t", part=0)
        return [row], [row]

    def _query_kafka(self) -> Mapping[Partition, OffsetBounds]:
        return {("t", 0): OffsetBounds(0, 1, 1)}


class _Ones(dict[str, Any]):
    """A row whose columns are 1 where nothing else is given."""

    def __missing__(self, name: str) -> int:
        return 1


def metric_names() -> dict[str, str]:
    """Return the names of all metrics as queries spell them, and their types."""
    rows = re.findall(r"^- `(outbox_\w+)[^`]*`(?: \((\w+)\))?: ", metrics_page(), re.MULTILINE)
    return {name: kind or ("counter" if name.endswith("_total") else "gauge") for name, kind in rows}


def _metrics(families: Iterable[Metric]) -> str:
    rows = []
    for family in families:
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        named = getattr(family, "_labelnames", None) or {
            label: None for sample in family.samples for label in sample.labels if label != "le"
        }
        labels = f"{{{','.join(named)}}}" if named else ""
        # The page says of the others how their names end. In the text format an info is a gauge.
        kind = "" if family.type in {"counter", "gauge", "info"} else f" ({family.type})"
        rows.append(f"- `{name}{labels}`{kind}: {_markdown(family.documentation)}")
    return "\n".join(rows)


# Errors


def errors_page() -> str:
    """Return the page of all errors that users can meet, and of the codes that stand for them."""
    found = [error for error in _errors(OutboxError) if not error.__name__.startswith("_")]
    embedded = [error for error in found if error.__module__ == "outbox.errors"]
    groups = {
        "A service that writes events": embedded,
        "A service that consumes with the inbox": [
            InboxReject,
            *(error for error in found if error.__module__.startswith("outbox.inbox")),
        ],
        "From topic to topic": [error for error in found if error.__module__.startswith("outbox.transform")],
        "The sandbox and the test fixtures": [
            error for error in found if error.__module__.startswith("outbox.sandbox")
        ],
        "Relays and operators' commands": [error for error in found if error.__module__.startswith("relay.")],
        "Consumer groups": [
            error for error in found if error.__module__.startswith(("outbox.consumer", "outbox._clients"))
        ],
        "Effects outside the database": [error for error in found if error.__module__.startswith("outbox.external")],
        "Spark jobs": [Reject, *(error for error in found if error.__module__.startswith("spark_jobs"))],
    }
    if missing := set(found) - {error for errors in groups.values() for error in errors}:
        raise Undocumented(f"errors of no group: {missing}")
    return _page(
        "Errors",
        """
        Every error that is raised on purpose is an `outbox.errors.OutboxError`. Its text says what happened, to what,
        and what to do; its attributes hold the same facts. Commands print the text on standard error. `Reject`, which
        you raise, is a plain `Exception`. In parentheses: an error's base.
        """,
        _exit_statuses(),
        "Tables, metrics and `--json` have codes: of [consumers' dead letters](../operations/dead-letters.md), "
        "[losses](../operations/offsets.md#what-kafka-loses), and [waiting lanes](metrics.md#reasons).",
        *(f"## {title}\n\n{_error_rows(errors)}" for title, errors in groups.items()),
    )


def _exit_statuses() -> str:
    rows = [
        ["0", "Done, or stopped as asked."],
        ["1", "It failed, or found a problem: the line on standard error, or the output, says which."],
        ["2", "Settings or arguments are wrong: a `ConfigurationError`."],
    ]
    return "## Exit statuses\n\n" + _table(["status", ""], rows)


def _errors(base: type[OutboxError]) -> Iterator[type[OutboxError]]:
    for package in (outbox, relay, spark_jobs):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            # Django's modules need its settings, and have no errors of their own.
            if module.name.rpartition(".")[2] != "__main__" and not module.name.startswith("outbox.django."):
                importlib.import_module(module.name)
    yield base
    yield from sorted(_below(base), key=_place)


def _below(base: type[OutboxError]) -> set[type[OutboxError]]:
    direct = {error for error in base.__subclasses__() if error.__module__.partition(".")[0] in _OURS}
    return direct.union(*map(_below, direct))


_OURS: Final = {"outbox", "relay", "spark_jobs"}


def _place(error: type) -> tuple[bool, str, int]:
    return not error.__module__.endswith(".errors"), error.__module__, inspect.getsourcelines(error)[1]


def _error_rows(errors: Sequence[type[Exception]]) -> str:
    """Return the list of these errors and their bases, below the module that most of them are in."""
    rows, modules = [], Counter(error.__module__ for error in errors)
    common = modules.most_common(1)[0][0]
    for error in errors:
        if not error.__doc__:
            raise Undocumented(f"{error.__module__}.{error.__name__} has no docstring")
        elsewhere = "" if error.__module__ == common else f" In `{error.__module__}`."
        base = error.__bases__[0]
        shown = "" if base in {OutboxError, Exception} else f" (`{base.__name__}`)"
        rows.append(f"- `{error.__name__}`{shown}: {_paragraph(error)}{elsewhere}")
    return f"In `{common}`{', unless another module is named' if len(modules) > 1 else ''}:\n\n" + "\n".join(rows)


# Roles


def roles_page() -> str:
    """Return the page of the rights of each kind of role."""
    parts = []
    outbox_tables(outboxes := sa.MetaData())
    consumer_tables(consumers := sa.MetaData())
    for title, of_sink in (("In the outbox's schema", False), ("In the consumers' schema", True)):
        tables_of = {table.name: table.columns.keys() for table in (consumers if of_sink else outboxes).tables.values()}
        parts.append(f"## {title}")
        for kind, purpose in members(RoleKind):
            assert isinstance(kind, RoleKind)
            if kind.of_sink is not of_sink:
                continue
            granted: dict[str, list[str]] = {}
            for rights, tables in TABLES.get(kind, ()):
                granted.setdefault(rights, []).extend(tables)
            for right, table, columns in COLUMNS.get(kind, ()):
                granted.setdefault(f"{right} {_columns(columns, tables_of.get(table, ()))}", []).append(table)
            rows = [f"- {', '.join(f'`{table}`' for table in tables)}: {rights}" for rights, tables in granted.items()]
            parts += [f"### `{kind}`\n\n{purpose}", *(["\n".join(rows)] if rows else [])]
    return _page(
        "Roles",
        """
        The rights that [`outbox db roles`](../operations/migrations.md#rights) prints for each kind of role, in
        addition to USAGE on the schema. A right on some columns lists them in parentheses, or after "without" the
        others.
        """,
        *parts,
    )


def _columns(named: Sequence[str], all_of_them: Sequence[str]) -> str:
    """Return the named columns of a table, or those that are left out where these are fewer."""
    others = [column for column in all_of_them if column not in named]
    shown = others if 0 < len(others) < len(named) else named
    text = ", ".join(f"`{column}`" for column in shown)
    return f"without {text}" if shown is others else f"({text})"


# What the pages are made of


def members(kind: type[Enum]) -> list[tuple[Enum, str]]:
    """Return the members of an enumeration with the docstrings that stand below them."""
    texts = _attributes(kind)
    if missing := [member.name for member in kind if member.name not in texts]:
        raise Undocumented(f"{kind.__name__}: {', '.join(missing)}")
    return [(member, texts[member.name]) for member in kind]


def _attributes(kind: type) -> dict[str, str]:
    """Return the docstrings below a class's attributes, each as one line of Markdown."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for before, after in zip(definition.body, definition.body[1:], strict=False):
        if not (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        ):
            continue
        match before:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                found[name] = _markdown(after.value.value)
    return found


def _paragraph(kind: type) -> str:
    return _markdown(inspect.cleandoc(kind.__doc__ or ""))


def _markdown(text: str) -> str:
    """Return a docstring as one line of Markdown. Its last part may be a list of attributes, in two columns."""
    lines = re.sub(r"^ *(\w+(?:, \w+)*) {2,}(?=\S)", r"`\1`: ", text, flags=re.MULTILINE)
    return " ".join(lines.replace("``", "`").split())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    first, *others = ["| " + " | ".join(line).rstrip() + " |" for line in lines]
    return "\n".join([first, "|" + "---|" * len(head), *others])


def _page(title: str, text: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", _NOTE.strip(), inspect.cleandoc(text), *parts]) + "\n"


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "settings.md": settings_page,
    "cli.md": cli_page,
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "roles.md": roles_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
