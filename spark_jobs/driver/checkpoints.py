"""The place of a stream's batch in Spark's checkpoint, and whether the batch may follow the one that the sink has.

The number of a batch alone is not enough: after a checkpoint was copied or restored, two different batches may have the
same number. So they are compared by a hash of what Spark wrote into the checkpoint when it planned the batch: the time,
and the offsets of each source. And a batch must follow the exact plan that the sink has.

| the checkpoint                              | what follows                                                           |
|---------------------------------------------|------------------------------------------------------------------------|
| lost or emptied: another batch 0            | CheckpointConflict: it might begin before what is applied, or behind;  |
|                                             | unless rows have ids, and the source is declared from_beginning        |
| an older copy: this batch's number or lower | CheckpointConflict, unless rows have ids, and the sink had the batch   |
|                                             | before it: then repeats are recognized                                 |
| another run of the query is ahead           | with ids nothing is applied, as the sink had this batch; without them  |
|                                             | CheckpointConflict                                                     |
| a copy that was continued elsewhere         | CheckpointConflict: another plan precedes this batch                   |
| newer than the sink, which was restored     | CheckpointConflict: the batches between are missing                    |
| of a query that did not use this before     | CheckpointConflict: its batches may or may not be in the sink          |

After checking that nothing is lost or repeated, continue with ``accept=``. The error says with which value, which is
valid for one state only.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from outbox.consumer.errors import JobError, shown
from spark_jobs.errors import CheckpointConflict

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEPT: Final = 100
"""The sink keeps the contents of this many batches."""
QUERY_ID: Final = "sql.streaming.queryId"
"""Spark's local property of a batch's thread and tasks: the query's id in the checkpoint."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The batch that the sink has. ``contents``: of it and of those before it, with a space between them."""

    query_id: str
    batch_id: int
    contents: str

    @property
    def content(self) -> str:
        return self.contents.partition(" ")[0]

    def has(self, batch: Batch) -> bool:
        """Return whether this batch is the last one or one of those before it."""
        return self._contents(batch.query_id, batch.batch_id)[:1] == [batch.content]

    def before(self, batch: Batch) -> list[str]:
        """Return the contents of the batches before this one, the last one first; none unless it follows that one."""
        contents = self._contents(batch.query_id, batch.batch_id - 1)
        return contents if contents[:1] == [batch.before] else []

    def _contents(self, query_id: str, batch_id: int) -> list[str]:
        """Return the contents of the batch with this number and of those before it; none if it is not known."""
        ago = self.batch_id - batch_id
        return self.contents.split()[ago:] if ago >= 0 and self.query_id == query_id else []

    @property
    def state(self) -> str:
        """The batch in the form that ``accept`` takes."""
        return f"{self.query_id}/{self.batch_id}/{self.content[:12]}"


Decision = Literal["apply", "accepted", "applied"]
NOTHING: Final = "nothing"
"""The state of a sink that has no batch of the group, as ``accept`` takes it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as Spark has planned it.

    query_id  stays the same as long as the checkpoint exists; run_id changes at each start.
    content   a hash of the batch's plan.
    before    the hash of the batch before it; None for the first one, and where Spark no longer has it.
    """

    query_id: str
    run_id: str
    batch_id: int
    content: str
    before: str | None

    def contents_after(self, stored: Stored | None) -> str:
        before = [] if stored is None else stored.before(self)
        return " ".join([self.content, *before][:KEPT])


def decide(
    group: str, stored: Stored | None, batch: Batch, *, accept: str | None, ids: bool, from_beginning: bool
) -> Decision:
    """Return whether a batch must be applied or was applied. Raises CheckpointConflict if that can't be decided.

    "accepted" must be applied as well, because the user accepted the state.

    ids  the rows have ids, by which repeats are recognized.
    """
    # Without ids, the rows of an older one may have been removed from the sink, to be applied again.
    if stored is not None and stored.has(batch) and (ids or batch.batch_id == stored.batch_id):
        return "applied"
    problem = _problem(group, stored, batch, ids=ids, from_beginning=from_beginning)
    if problem is None:
        return "apply"
    state = NOTHING if stored is None else stored.state
    if accept != state:
        raise CheckpointConflict(
            f"{problem}. Nothing of this batch was applied. Put back the checkpoint that belongs to the sink; or "
            "make sure where the stream begins and what the sink has, and continue with "
            f"exactly_once(job, accept={state!r}), or the option accept of the format outbox",
            state,
        )
    return "accepted"


def _problem(group: str, stored: Stored | None, batch: Batch, *, ids: bool, from_beginning: bool) -> str | None:
    """Return why a batch may not follow what the sink has; None where it does."""
    number = batch.batch_id
    if stored is None:
        problem = (
            f"the sink has no batch of group {group}, but the query begins with batch {number}: nothing shows whether "
            "those before it are in the sink"
        )
        return problem if number > 0 else None
    if number == 0 or stored.query_id != batch.query_id:
        problem = (
            f"the sink has batch {stored.batch_id} of query {stored.query_id}, and this is batch {number} of query "
            f"{batch.query_id}, so the checkpoint is a new one or was emptied: it may begin before what is applied, or "
            "behind it"
        )
        return None if ids and from_beginning and number == 0 else problem
    if number <= stored.batch_id:
        problem = (
            f"the sink has batch {stored.batch_id}, and this is another batch with the number {number}: the "
            "checkpoint is an older copy, and some rows of this batch may be applied already"
        )
        if ids and not stored.before(batch):
            return (
                f"the sink has batch {stored.batch_id}, and nothing shows that it had the one that precedes this batch "
                f"{number}: the checkpoint is a copy that was continued elsewhere, or of more than {KEPT} batches ago"
            )
        # Repeats are recognized by their ids, and an older checkpoint skips nothing.
        return None if ids else problem
    if number > stored.batch_id + 1:
        return (
            f"the sink has batch {stored.batch_id}, and this is batch {number}: the sink was put back, and the batches "
            "between are missing there"
        )
    problem = (
        f"the sink has another batch {stored.batch_id} than the one that precedes this batch {number}: the "
        "checkpoint is a copy that was continued elsewhere"
    )
    return None if stored.before(batch) else problem


def planned(rows: DataFrame, batch_id: int) -> Batch:
    """Return a batch as Spark planned it in its checkpoint. Raises JobError if the plan can't be read."""
    session = rows.sparkSession
    if not hasattr(session, "_jsparkSession"):
        raise JobError("exactly_once: a session of Spark Connect is on another machine; it needs Spark's driver here")
    query_id = session.sparkContext.getLocalProperty(QUERY_ID)
    if query_id is None:
        raise JobError("exactly_once: no query is running here: give the function to writeStream.foreachBatch")
    jvm: Any = session.sparkContext._jvm  # noqa: SLF001  no public API shows a batch's plan
    queries = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001
    query = queries.get(jvm.java.util.UUID.fromString(query_id))
    content = None if query is None else _content(jvm, query, batch_id)
    if content is None:
        raise JobError(
            f"exactly_once: the plan of batch {batch_id} is not in the query's checkpoint, so a batch that comes again "
            "could not be known; asynchronous progress tracking has to be off"
        )
    before = _content(jvm, query, batch_id - 1) if batch_id > 0 else None
    return Batch(query_id, query.runId().toString(), batch_id, content, before)


def _content(jvm: Any, query: Any, batch_id: int) -> str | None:
    """Return a hash of a batch's plan; None when it is not in the checkpoint."""
    log = query.offsetLog()
    found = log.get(batch_id)
    if not found.isDefined():
        return None
    written = jvm.java.io.ByteArrayOutputStream()
    log.serialize(found.get(), written)
    return content_of(bytes(written.toByteArray()).decode())


def planned_in(folder: str, batch_id: int, run_id: str) -> Batch:
    """Return a batch as Spark planned it in the checkpoint in a folder: a path, or a URI that pyarrow.fs knows.

    Raises JobError if the plan can't be read there.
    """
    from pyarrow import ArrowException, fs

    # Spark's scheme is that of Hadoop's client.
    uri = folder.replace("s3a://", "s3://", 1) if ":" in folder else str(Path(folder).absolute())

    def read(name: str) -> str:
        files, path = fs.FileSystem.from_uri(uri)
        with files.open_input_stream(f"{path}/{name}") as stream:
            return bytes(stream.read()).decode()

    try:
        query_id = json.loads(read("metadata"))["id"]
        content = content_of(read(f"offsets/{batch_id}"))
        try:
            before = content_of(read(f"offsets/{batch_id - 1}")) if batch_id > 0 else None
        except FileNotFoundError:
            # Spark keeps the last ones only.
            before = None
    except (OSError, ArrowException, ValueError, KeyError, TypeError) as error:
        raise JobError(
            f"checkpointLocation {folder}: the driver's Python can't read the plan of batch {batch_id} there, so a "
            f"batch that comes again could not be known: {shown(error)}. It must be a path that Python can read too, "
            "or a URI that pyarrow.fs knows; asynchronous progress tracking has to be off"
        ) from error
    return Batch(query_id, run_id, batch_id, content, before)


def content_of(text: str) -> str:
    """Return a hash of a batch's entry in the offset log: when it was planned, and the end of each source.

    Spark's settings, which the entry has too, are left out: a newer version may add some without changing the batch.
    Raises JobError for an entry in an unknown format.
    """
    _, _, rest = text.partition("\n")
    metadata, _, offsets = rest.partition("\n")
    try:
        planned_at = json.loads(metadata)["batchTimestampMs"]
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(f"the checkpoint's offset log has a form that is not known: {text[:80]!r}") from error
    identity = json.dumps([planned_at, *map(_canonical, offsets.splitlines())], separators=(",", ":"))
    return hashlib.sha256(identity.encode()).hexdigest()


def _canonical(offset: str) -> str:
    """Return an offset in canonical form: the order of a map may differ between writing and reading."""
    try:
        return json.dumps(json.loads(offset), sort_keys=True)
    except ValueError:
        return offset
