"""Every fenced block of the documentation is run, parsed or compared with what it is about.

Here is what needs no server. tests/integration/docs/test_blocks.py runs SQL and the fixtures' example; RUN names the
tests that run a whole page.
"""

from __future__ import annotations

import ast
import configparser
import datetime as dt
import importlib
import inspect
import json
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import create_autospec
from uuid import UUID

import pytest
import sqlalchemy as sa
import typer
from alembic.runtime.environment import EnvironmentContext
from docs_support import ROOT, Block, blocks, generator, inline
from typer.core import TyperGroup

from examples.demo.ledger import Reconciliation
from outbox._app.choices import Delivery
from outbox._app.prometheus import Check
from outbox._app.settings import Settings, WebSettings
from outbox._clients.clock import uptime
from outbox.consumer.admin.trace import GroupTrace
from outbox.consumer.tables import consumer_tables
from outbox.credentials import Credential, CredentialRequest
from relay.cli import trace
from relay.cli.app import app
from relay.config import SourceKind, load
from relay.core.health import WorkerHealth
from relay.core.lease import Lease
from relay.core.ports import BrokerUnavailable, LaneLocked
from relay.operations.guarantee import Strategy, guarantee
from relay.operations.trace import Event, MessageRef
from relay.page.security import SECRET_HEADER
from relay.pipeline.trace import Found
from spark_jobs.health import ConsumerHealth

RUN = {
    "README.md": "tests/acceptance/test_quickstart.py",
    "docs/guides/writing-events.md": "tests/integration/outbox/test_writer_docs.py",
    "docs/guides/inbox.md": "tests/integration/outbox/inbox/test_docs.py",
    "docs/guides/kafka-to-kafka.md": "tests/acceptance/test_transform.py",
    "docs/guides/notebooks.md": "tests/spark/test_page_notebooks.py",
    "docs/guides/testing.md": "tests/integration/docs/test_blocks.py",
    "docs/operations/page.md": "tests/integration/relay/page/test_access.py",
    "docs/reference/message-format.md": "tests/integration/relay/kafka/test_message_format.py",
}
"""Pages whose Python is run as a whole elsewhere."""

DECLARED = {
    "docs/guides/consumers.md": {},
    "docs/guides/decoding.md": {},
    "docs/guides/external.md": {"api_token": lambda: {"Authorization": "Bearer t"}},
    "docs/guides/pipelines.md": {},
    "docs/guides/strategies.md": {},
    "docs/operations/migrations.md": {
        "metadata": sa.MetaData(),
        "connection": None,
        "context": create_autospec(EnvironmentContext, instance=True),  # env.py's
    },
    "docs/operations/secrets.md": {"password_of": lambda host, user: "p", "token_for_kafka": lambda: "t"},
}
"""Pages whose Python needs no server, and what it finds defined. It is run here, block by block."""

RECIPES = "docs/guides/recipes.md"
EXCERPTS = {RECIPES: "examples/recipes", "docs/guides/django.md": "examples/recipes/django_shop"}
"""Pages whose Python and SQL are lines of files in a folder, each of the file that is linked last before the block.

Tests run these files: test_recipes*.py in tests/acceptance and tests/spark.
"""

ELSEWHERE = {"docs/operations/scheduling.md"}
"""Pages with Python that needs what is not here (Airflow, Databricks): compiled; our names are bound."""

NOT_INSTALLED = {"airflow", "mymodule"}
"""What these import that is not here: the other system, and the reader's own module."""

LANGUAGES = {
    *("python", "sh", "crontab", "ini", "toml", "json", "mermaid", "nginx", "text"),  # below
    "sql",  # tests/integration/docs/test_blocks.py, tests/acceptance/runbooks, tests/peers/page.py
}

PLACEHOLDERS = {
    "EVENT_ID": "0199d2a5-0000-7000-8000-000000000000",
    "MESSAGE_ID": "0199d2a5-0000-7000-8000-000000000000",
    "PARTITION": "0",
    "OFFSET": "17",
    "LANE": "3",
    "TIME": "2026-11-26T07:15:00",
    "DEAD_LETTER": "17",
}
"""Values for what stands in capitals in a command and has to be of a type."""

COMMANDS = {
    *("cd", "curl", "eval", "export", "flock", "jq", "kill", "outbox", "pip", "python", "python3", ".", "make"),
    *("xargs", "sed", "opentelemetry-instrument", "docker", "kubectl", "helm", "spark-submit", "kafka-transactions.sh"),
}

READERS = {"shop.py", "manage.py"}
"""Scripts of the reader's own."""

HEREDOC = re.compile(r"<<'(\w+)'\n(.*?)^\1$", re.MULTILINE | re.DOTALL)


def each(*languages: str):
    found = blocks(*languages)
    assert found, languages
    return pytest.mark.parametrize("block", found, ids=lambda block: block.where)


def test_every_block_says_its_language_and_every_language_has_a_check():
    assert [block.where for block in blocks() if block.language not in LANGUAGES] == []
    assert {block.language for block in blocks()} == LANGUAGES


# --- Python


def test_every_page_with_python_is_run_or_named():
    pages = {block.page for block in blocks("python")}
    assert pages == {*RUN, *DECLARED, *EXCERPTS, *ELSEWHERE}
    for page, test in RUN.items():
        name = Path(page).name
        assert name in (ROOT / test).read_text(), f"{test} does not read {page}"


@each("python")
def test_python_compiles_and_its_imports_are_there(block: Block):
    tree = ast.parse(block.text)
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)):
                for name in node.names:
                    found[name.asname or name.name] = (module, name.name)
            case ast.Import():
                for name in node.names:
                    found[name.asname or name.name] = (name.name, None)
    for module, name in found.values():
        if module.partition(".")[0] in NOT_INSTALLED:
            assert block.page in ELSEWHERE, f"{block.where}: {module}"
            continue
        imported = importlib.import_module(module)
        assert name is None or hasattr(imported, name), f"{block.where}: {module} has no {name}"
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        module, name = found.get(call.func.id, ("", None)) if isinstance(call.func, ast.Name) else ("", None)
        if name is not None and module.partition(".")[0] in {"outbox", "relay", "spark_jobs"}:
            signature = inspect.signature(getattr(importlib.import_module(module), name))
            # Raises where an argument is not one.
            signature.bind(*call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords})


@pytest.mark.parametrize("page", DECLARED)
def test_declarations_hold(page, monkeypatch):
    monkeypatch.setenv("REGISTRY_USER_INFO", "user:password")
    # Dataclasses and mapped classes look their module up.
    namespace = {"__name__": __name__, **DECLARED[page]}
    for block in blocks("python"):
        if block.page == page:
            exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec", dont_inherit=True), namespace)
    if provider := namespace.get("credentials"):
        answers = [provider(CredentialRequest("postgres")), provider(CredentialRequest("kafka"))]
        assert [(type(one), one.secret) for one in answers] == [(Credential, "p"), (Credential, "t")]
    else:
        assert "job" in namespace or "outbox.events" in namespace["metadata"].tables


def excerpted(page: str) -> list[tuple[Path, Block]]:
    """Return a page's blocks of Python and SQL, each with the file that is linked last before it."""
    text = (ROOT / page).read_text()
    links = [
        (text[: link.start()].count("\n") + 1, ((ROOT / page).parent / link[1]).resolve())
        for link in re.finditer(rf"\]\(([^)\s]*{EXCERPTS[page]}/[^)\s]+)\)", text)
    ]
    found = []
    for block in blocks("python", "sql"):
        if block.page == page:
            before = [file for line, file in links if line < block.line]
            assert before, f"{block.where}: no file of {EXCERPTS[page]} is linked before it"
            found.append((before[-1], block))
    return found


@pytest.mark.parametrize("page", EXCERPTS)
def test_excerpts_are_lines_of_their_file(page):
    """They follow each other in the file, perhaps with more indentation."""
    for file, block in excerpted(page):
        lines, wanted = file.read_text().splitlines(), block.text.splitlines()
        parts = (lines[at : at + len(wanted)] for at in range(len(lines)))
        assert any(textwrap.dedent("\n".join(part)).splitlines() == wanted for part in parts), (
            f"{block.where} is not in {file.relative_to(ROOT)}"
        )


def test_every_recipe_has_a_section_and_is_run():
    folder = ROOT / EXCERPTS[RECIPES]
    excerpted_from = {folder / file.relative_to(folder).parts[0] for file, _ in excerpted(RECIPES)}
    assert excerpted_from == set(recipes()), "each file or project has a section, and each section one of them"
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*/test_recipes*.py"))
    assert [file.name for file in recipes() if file.stem not in tests] == []


def recipes() -> list[Path]:
    """Return what the recipes' folder holds: files of Python or SQL, and folders that are whole projects."""
    found = (ROOT / EXCERPTS[RECIPES]).iterdir()
    projects = "manage.py", "spark-pipeline.yml"
    return [each for each in found if each.suffix in {".py", ".sql"} or any((each / one).is_file() for one in projects)]


# --- Commands


ROOT_COMMAND = typer.main.get_command(app)


def parse(words: Sequence[str], where: str) -> None:
    """Fail unless the command line takes these words, which begin behind ``outbox``."""
    command, rest = ROOT_COMMAND, [PLACEHOLDERS.get(word, word) for word in words]
    while isinstance(command, TyperGroup):
        if command.invoke_without_command and not (rest and rest[0] in command.commands):
            break
        assert rest, f"{where}: a command is missing"
        assert rest[0] in command.commands, f"{where}: outbox has no {' '.join(words)}"
        command = command.commands[rest.pop(0)]
    command.make_context(where, rest)


def commands(script: str) -> Iterator[list[str]]:
    """Yield the simple commands of a script, those in ``$(…)`` among them, without redirections and assignments."""
    script = HEREDOC.sub("", script).replace("\\\n", " ")
    for line in script.splitlines():
        for inner in re.findall(r"\$\(([^)]*)\)", line):
            yield from commands(inner)
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in {";", "|", "&", "&&", "||"}:
                if words:
                    yield words
                words = []
            elif not re.fullmatch(r"[A-Z_]+=.*", word) or words:
                words.append(word)


def check_command(words: list[str], where: str) -> None:
    name = words[0].rpartition("/")[2] or words[0]
    assert name in COMMANDS, f"{where}: {name} is no command that is known here"
    match name:
        case "outbox":
            end = next((at for at, word in enumerate(words) if word and set(word) <= set("<>&")), len(words))
            parse(words[1:end], where)
        case "flock" | "xargs" | "opentelemetry-instrument":
            inner = next(at for at, word in enumerate(words) if word.endswith("outbox"))
            check_command(words[inner:], where)
        case "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), where
        case "pip":
            check_extras(" ".join(words), where)
        case "python" | "python3":
            scripts = [word for word in words[1:] if word.endswith(".py") and word not in READERS]
            assert all((ROOT / script).is_file() for script in scripts), where


def check_extras(text: str, where: str) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for extras in re.findall(r"outbox-kafka\[([\w,]+)\]", text):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), f"{where}: no extra {extra}"


@each("sh")
def test_commands_are_those_of_the_command_line(block: Block):
    checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, ""), block.where
    for _, program in HEREDOC.findall(block.text):
        ast.parse(program)
    found = list(commands(block.text))
    assert found
    for words in found:
        check_command(words, block.where)


@each("crontab")
def test_crontab(block: Block):
    for line in block.text.splitlines():
        *times, script = line.split(None, 5)
        assert all(re.fullmatch(r"[\d*/,-]+", time) for time in times)
        assert [words[0] for words in commands(script)] == ["cd", "flock"]
        for words in commands(script):
            check_command(words, block.where)


@each("ini")
def test_systemd_unit(block: Block):
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(block.text)
    assert unit.sections() == ["Unit", "Service", "Install"]
    check_command(unit["Service"]["ExecStart"].split(), block.where)


def test_commands_in_sentences():
    """`outbox …` in a sentence names a command, and options that it has."""
    sessions = re.findall(
        r'f"(outbox [a-z]+ )\{', "".join(path.read_text() for path in (ROOT / "spark_jobs").rglob("*.py"))
    )
    checked = 0
    for page, span in inline():
        if not span.startswith("outbox ") or any(span.startswith(f"{name}GROUP") for name in sessions):
            continue
        if span == "outbox GROUP":  # Spark's job group
            continue
        span = span.partition(" -- ")[0]  # the rest is another command's
        first, *others = [
            part.split() for part in re.sub(r"[…\[\]]|\{[^}]*\}|'[^']*'|\"[^\"]*\"", " ", span).split("|")
        ]
        command, group = ROOT_COMMAND, ROOT_COMMAND
        words = first[1:]
        while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{page}: `{span}`"
            command, group = command.commands[words.pop(0)], command
        meant = [command, *command.commands.values()] if isinstance(command, TyperGroup) else [command]
        options = {name for one in meant for each in one.params for name in (*each.opts, *each.secondary_opts)}
        named = {word.partition("=")[0] for part in (words, *others) for word in part if word.startswith("--")}
        assert named - options == set(), f"{page}: `{span}`"
        for part in others:
            if part and not part[0].startswith("-") and part[0].islower():
                assert part[0] in group.commands, f"{page}: `{span}`"
        checked += 1
    assert checked > 100


# --- Settings, tables and metrics in sentences


def test_settings_tables_and_metrics_in_sentences():
    """`relay.batch_size` is a setting, `consumer.losses` a table, `outbox_relay_ready` a metric."""
    metrics = generator.metric_names()
    assert len(metrics) > 25
    consumer_tables(metadata := sa.MetaData())
    tables = set(metadata.tables)
    sections = ("relay", "failures", "wal", "consumer")  # what begins with "spark." is Spark's
    checked = {"setting": 0, "table": 0, "metric": 0}
    for page, span in inline():
        if match := re.fullmatch(rf"({'|'.join(sections)})\.([a-z_]+)", span):
            section, name = match.groups()
            if span in tables:
                checked["table"] += 1
            elif not (ROOT / span.replace(".", "/")).with_suffix(".py").is_file():  # a module, on the page of errors
                model = Settings.model_fields[section].annotation
                assert name in model.model_fields, f"{page}: `{span}`"
                checked["setting"] += 1
        elif match := re.match(r"outbox_(relay|slot|consumer)_\w+", span):
            assert match[0] in metrics, f"{page}: `{span}`"
            checked["metric"] += 1
    assert min(checked.values()) > 3, checked


# --- Other languages


@each("toml")
def test_settings_files_are_read(block: Block, tmp_path, monkeypatch):
    file = tmp_path / "outbox.toml"
    file.write_text(block.text)
    monkeypatch.setenv("OUTBOX_CONFIG", str(file))
    assert load() != Settings.model_construct()


@each("json")
def test_json_is_json(block: Block):
    assert isinstance(json.loads(block.text), dict)


@each("mermaid")
def test_pictures(block: Block):
    """Participants of a sequence are declared, nodes of a flowchart are connected."""
    first, *lines = [line.strip() for line in block.text.splitlines()]
    if first == "sequenceDiagram":
        known = {match[1] for line in lines if (match := re.fullmatch(r"participant (\w+) as .+", line))}
        ends = [re.fullmatch(r"(\w+)--?>>(\w+): .+", line) for line in lines if not line.startswith("participant")]
        assert {end[at] for end in ends for at in (1, 2)} == known
    else:
        assert first == "flowchart LR"
        node = r'\w+(?:\[\[?\(?"[^"]+"\)?\]\]?|\[\("[^"]+"\)\])?'
        assert [line for line in lines if not re.fullmatch(rf'{node} --(?: "?[^">]+"? --)?> {node}', line)] == []


def test_what_is_recommended_is_what_is_promised():
    """A strategy and a stream give exactly-once; to a consumer at-most-once the relay repeats nothing."""
    (tree,) = [block for block in blocks("mermaid") if block.page == "docs/explanation/choosing.md"]
    leaves = [leaf.partition("<br/>") for leaf in re.findall(r'\[\["(.+?)"\]\]', tree.text)]
    assert {delivery for delivery, *_ in leaves} == set(Delivery)
    said = {f"strategy={strategy}(": strategy for strategy in Strategy}
    said |= {"format('outbox')": Strategy.STREAM, "delivery='at-most-once'": Strategy.AT_MOST_ONCE}
    chosen = [(delivery, said[words]) for delivery, _, text in leaves for words in said if words in text]
    assert {name for _, name in chosen} == {"Version", "Natural", "Dedup", "OffsetsOnly", "Stream", "AtMostOnce"}
    for delivery, strategy in chosen:
        promised = guarantee(Delivery(delivery), SourceKind.POLLING, strategy)
        assert promised.word == ("at-most-once" if strategy is Strategy.AT_MOST_ONCE else "exactly-once")
        assert "what a relay repeats" not in promised.text
    (advice,) = [text for delivery, _, text in leaves if delivery == "at-most-once"]
    assert "relay.at_most_once_acks" in advice


def test_a_proxy_sends_what_the_page_reads():
    (block,) = blocks("nginx")
    sent = re.findall(r"proxy_set_header (\S+)", block.text)
    assert sent == ["Host", SECRET_HEADER, WebSettings().user_header]


def test_output_is_what_is_printed():
    (figures,) = [block for block in blocks("text") if block.page == "README.md"]
    committed, repeated, *rest = map(int, re.findall(r"\d+", figures.text))
    assert figures.text == Reconciliation(committed, committed + repeated, repeated, *rest, 0, 0).line() + "\n"
    # An event's way, and what /readyz?verbose answers, are below; a log: tests/integration/docs/test_kafka_log.py.
    assert {block.page for block in blocks("text")} == {
        "README.md",
        "docs/explanation/kafka.md",
        "docs/operations/relay.md",
        "docs/operations/scheduling.md",
    }


def test_the_way_of_an_event_is_what_is_printed(capsys):
    (shown,) = [each for each in blocks("text") if each.page.endswith("relay.md") and each.text.startswith("event")]
    written = dt.datetime(2026, 11, 23, 9, 15, 4, 128_000, dt.UTC)
    published = written + dt.timedelta(milliseconds=7)
    message = MessageRef("order-events", 1, 4711, written + dt.timedelta(milliseconds=3))
    event = Event(
        UUID(re.findall(r"event (\S+)", shown.text)[0]),
        "published",
        lane=2,
        aggregate_type="Order",
        aggregate_id="17",
        event_type="order.placed",
        created_at=written,
        published_at=published,
        message=message,
    )
    found = Found(event)
    found.groups = [
        GroupTrace("totals", "applied", published + dt.timedelta(milliseconds=36)),
        GroupTrace("shipping", "waiting", behind=12),
    ]
    trace.show(found)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.text.splitlines()


def answered(page: str, checks: Sequence[Check]) -> None:
    """Compare a page's example of /readyz?verbose with the lines of these checks."""
    (shown,) = [each for each in blocks("text") if each.page == page and "readyz check" in each.text]
    *lines, last = shown.text.splitlines()
    assert lines == [check.line() for check in checks]
    assert last == f"readyz check {'passed' if all(check.passed or not check.counts for check in checks) else 'failed'}"


def test_the_checks_of_a_relay_are_what_is_answered():
    now = 1000.0
    health = WorkerHealth(45.0, lambda: now)
    health.ticked(started=True)
    health.waits([2], LaneLocked(2))
    now += 21
    health.upkeep_waits("archive")
    now += 38
    health.waits([1], BrokerUnavailable("away"))
    now += 2
    health.ticked(started=True)
    leases = [Lease(lane, 1, 1000.0, uptime()) for lane in range(3)]
    found = health.look(leases, now, topics={"order-events": "topic 'order-events' does not exist"})
    answered("docs/operations/relay.md", found.checks)
    assert not found.ready


def test_the_checks_of_a_consumer_are_what_is_answered():
    now = 1000.0
    health = ConsumerHealth(300.0, lambda: now)
    health.succeeded()
    now += 3
    health.observe("waiting for a server", {"error": "Postgres: connection refused"})
    now += 309
    found = health.look()
    answered("docs/operations/scheduling.md", found.checks)
    assert not found.ready
