"""A certificate can't be changed, and `outbox audit verify` notices whatever is changed afterwards."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from audit_support import EVENTS, Pipeline, pipeline
from support import order

__all__ = ["order", "pipeline"]


def certified(pipeline: Pipeline, file: Path, *options: str) -> list[bytes]:
    status, found = pipeline.audit("--certificate", str(file), *options)
    assert status == 0, found
    return file.read_bytes().splitlines()


def verify(pipeline: Pipeline, file: Path, *options: str, status: int = 0) -> str:
    return pipeline.command("audit", "verify", str(file), *options, status=status)


def chained(lines: list[bytes], at: int, **values: Any) -> list[bytes]:
    """Return the lines of a forger, who has given one of them these values, and then repeated the hashes."""
    objects = [orjson.loads(line) for line in lines]
    objects[at] |= values
    forged: list[bytes] = []
    for one in objects:
        previous = hashlib.sha256(forged[-1]).hexdigest() if forged else one["previous"]
        forged.append(orjson.dumps({**one, "previous": previous}, option=orjson.OPT_SORT_KEYS))
    return forged


@contextmanager
def changed(pipeline: Pipeline, *tables: str) -> Iterator[None]:
    """Keep what is in the tables, for as long as something else is there."""
    copies = {table: f"public.before_{table.split('.')[1]}" for table in tables}
    for table, copy in copies.items():
        pipeline.run(f"CREATE TABLE {copy} AS TABLE {table}")
    yield
    for table in tables:
        pipeline.run(f"DELETE FROM {table}")
    for table, copy in copies.items():
        pipeline.run(f"INSERT INTO {table} TABLE {copy}; DROP TABLE {copy}")


def test_each_later_change_of_the_events_is_noticed(pipeline, tmp_path):
    """Also that the tables of consumers are elsewhere, a group is gone, or it is another outbox with these topics."""
    ids, file, new = pipeline.sent(), tmp_path / "certificate", tmp_path / "new"
    pipeline.applied(EVENTS)
    lines = certified(pipeline, file)
    digest = hashlib.sha256(lines[-1]).hexdigest()
    assert "all as they were" in verify(pipeline, file, "--sha256", digest.upper())
    verify(pipeline, file, "--sha256", "0" * 64, status=2)
    archive, remembered = "outbox.published", "consumer.processed_messages"
    for table, damage, named in (
        (archive, "UPDATE {table} SET payload = '[]' WHERE event_id = '{id}'", "1 payload"),
        (archive, "UPDATE {table} SET event_id = gen_random_uuid() WHERE event_id = '{id}'", "1 unknown"),
        (archive, "DELETE FROM {table} WHERE event_id = '{id}'", "1 unknown"),
        (remembered, "DELETE FROM {table} WHERE message_id = '{id}'", "1 missing"),
    ):
        with changed(pipeline, table):
            pipeline.run(damage.format(table=table, id=ids[5]))
            assert named in verify(pipeline, file, status=1), damage
    group = ("consumer.groups", "consumer.offsets", remembered)
    with changed(pipeline, *group):
        for table in group:
            pipeline.run(f"DELETE FROM {table}")
        assert f"without group {pipeline.group}, " in verify(pipeline, file, status=1)
    with changed(pipeline, archive):
        pipeline.run(f"DELETE FROM {archive}")
        assert "none can be" in verify(pipeline, file, status=1)
        # Nor does what is on Kafka alone make a certificate.
        pipeline.audit("--certificate", str(new))
        assert not new.exists()
    verify(pipeline, file)
    pipeline.repeat(ids[5])
    assert "1 repeated" in verify(pipeline, file, status=1)


def test_it_is_repeated_as_the_audit_was_made(pipeline, tmp_path):
    """With a group that leaves events out, or of another group alone."""
    ids = pipeline.sent()
    pipeline.applied(EVENTS)
    other = pipeline.kafka.name("other")
    for table in ("groups", "offsets", "processed_messages"):
        copied = f"(jsonb_populate_record(t, jsonb_build_object('grp', '{other}'))).*"
        pipeline.run(f"INSERT INTO consumer.{table} SELECT {copied} FROM consumer.{table} AS t")
    pipeline.run(f"DELETE FROM consumer.processed_messages WHERE message_id = '{ids[5]}' AND grp = '{pipeline.group}'")
    assert pipeline.differences() == [("missing", ids[5])]
    for option, group in (("--partial", pipeline.group), ("--group", other)):
        certified(pipeline, tmp_path / option, option, group)
        verify(pipeline, tmp_path / option)
    shown = pipeline.command("audit", "--partial", pipeline.group, "--partial", "nobody")
    assert "--partial nobody: no such group reads what is compared" in shown
    pipeline.run(f"DELETE FROM consumer.processed_messages WHERE message_id = '{ids[6]}' AND grp = '{pipeline.group}'")
    said = verify(pipeline, tmp_path / "--partial", status=1)
    (was,) = re.findall(rf"applied by group {pipeline.group} is \d+, was (\d+)\n", said)
    assert f"applied by group {pipeline.group} is {int(was) - 1}, was {was}\n" in said
    assert f"the sum of ids applied by group {pipeline.group} is " in said


def test_a_file_that_was_changed_is_none(pipeline, tmp_path):
    pipeline.add(EVENTS, ago=1200)
    pipeline.sent()
    file = tmp_path / "certificate"
    lines = certified(pipeline, file)
    assert len(lines) >= 4
    for changed in (
        [lines[0].replace(b"at-least-once", b"exactly-once"), *lines[1:]],
        [*lines[:1], lines[1].replace(b'"kafka":', b'"kafka":1'), *lines[2:]],
        [*lines[:1], *lines[2:]],
        [lines[0], lines[2], lines[1], *lines[3:]],
        [*lines[:2], lines[1], *lines[2:]],
        lines[:-1],
        chained(lines, 0, format=2),
        chained(lines, 0, key="zz"),
        chained(lines, 0, since="x"),
        chained(lines, 0, since=1700000000),
        chained(lines, 1, groups=[]),
        chained(lines, 1, committed=None),
        chained(lines, 1, sums={"kafka": "1"}),
        chained(lines, -1, differences=7),
    ):
        file.write_bytes(b"\n".join(changed) + b"\n")
        verify(pipeline, file, status=2)
    file.write_bytes(b"\n".join(chained(lines, 1)) + b"\n")
    verify(pipeline, file)


def test_a_misspelled_topic_is_an_error(pipeline):
    pipeline.sent()
    assert "does not exist" in pipeline.command("audit", "--topic", f"{pipeline.topic}s", status=2)
