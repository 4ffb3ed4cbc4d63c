"""Follow one event through both sides of the pipeline: the outbox, Kafka, and each consumer group.

`outbox trace` and the operations page show the same.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Final, TypedDict
from uuid import UUID

from outbox._app.settings import client_options
from outbox._app.text import time_text
from outbox._clients.counting import counted
from outbox.consumer.admin import trace as consumers
from outbox.consumer.admin.status import has_tables
from outbox.consumer.admin.trace import GroupTrace
from outbox.consumer.postgres_errors import connect
from outbox.errors import OutboxError
from outbox.event import AGGREGATE_TYPE, CE_TIME, CE_TYPE, EVENT_TYPE
from relay.config import Settings
from relay.database import Connector
from relay.kafka.offsets import Partition
from relay.operations.event_search import Contents
from relay.operations.topic_scan import TopicRecord, record_at
from relay.operations.trace import Event, MessageRef, find, search, time_of, topics_of, written_at
from relay.parts import build_router
from relay.pipeline.consumers import state_word

_READ_SECONDS: Final = 3.0
_LAST: Final = dt.datetime.max.replace(tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happened to an event, or that it waits for.

    state          good, bad or unknown.
    milliseconds   since the step before it, of a group since the event was on Kafka; None where that is not known.
    group, letter  the consumer group that it is about, and the number of the dead letter.
    """

    title: str
    state: str
    at: dt.datetime | None = None
    milliseconds: float | None = None
    text: str = ""
    group: str | None = None
    letter: int | None = None

    def line(self) -> str:
        line = self.title if self.at is None else f"{self.title} {time_text(self.at)}"
        if self.milliseconds is not None:
            line += f", {self.milliseconds:,.0f} ms later"
        return line + (f"{': ' if self.at is None else ', '}{self.text}" if self.text else "")


class TraceFigures(TypedDict):
    """What is known about an event, as JSON."""

    event: Mapping[str, Any]
    messages: Sequence[Annotated[dict[str, Any], MessageRef]]
    groups: Sequence[Annotated[dict[str, Any], GroupTrace]]
    searched_to_the_end: bool
    unseen: Sequence[str]


class Found:
    """Everything that is known about an event.

    whole     whether all topics were read to their ends, if a search was needed.
    contents  what the first message on Kafka says; None if it was not read. ``gone``: Kafka has it no longer.
    unseen    the errors of what could not be read.
    """

    def __init__(self, event: Event) -> None:
        self.event = event
        self.messages: Sequence[MessageRef] = [] if event.message is None else [event.message]
        self.groups: Sequence[GroupTrace] = ()
        self.whole = True
        self.searched = False
        self.contents: Contents | None = None
        self.gone = False
        self.unseen: list[str] = []

    @property
    def known(self) -> bool:
        met = (group.state in {"applied", "dead", "given-up"} or group.external for group in self.groups)
        return self.event.state != "unknown" or bool(self.messages) or any(met)

    def steps(self) -> list[Step]:
        """Return the event's way as far as it is known, from its writing to each consumer group."""
        return [*_relay_side(self), *_consumers_side(self)]

    def as_dict(self) -> TraceFigures:
        event = {name: value for name, value in asdict(self.event).items() if name != "message"}
        return {
            "event": event,
            "messages": [asdict(one) for one in self.messages],
            "groups": [asdict(group) for group in self.groups],
            "searched_to_the_end": self.whole,
            "unseen": self.unseen,
        }


def find_event(
    settings: Settings,
    event_id: UUID,
    named: Sequence[str],
    seconds: float,
    since: dt.datetime | None = None,
) -> Found:
    """Return everything that is known about an event. Raises ConfigurationError, and the outbox's errors.

    named     topics to look through besides its own, for at most ``seconds``.
    since     where to begin in the topics; by default when the event was written, by its row or its id.
    """
    hidden: dict[str, str] = {}
    with Connector(settings.require_database(), "outbox trace")() as connection:
        found = Found(find(connection, settings.db_schema, event_id, hidden))
    found.unseen += [f"{settings.db_schema}.{table} can't be read: {why}" for table, why in hidden.items()]
    event = found.event
    topics = list(named) or _topics(settings, event)
    search_kafka = partial(_search, found, settings, seconds=seconds, named=bool(named), since=since)
    try:
        sink_url = settings.relay.sink_url
        with connect(sink_url or settings.require_database(), "outbox trace") as connection:
            schema = settings.consumer_schema
            exist = sink_url is not None or has_tables(connection, schema)
            if exist and event.aggregate_type is None and not named:
                # The topic of an event that left no row is unknown, so the topics that groups read are searched too.
                topics = sorted({*topics, *consumers.topics(connection, schema)})
            search_kafka(topics)
            if exist:
                refs = [(one.topic, one.partition, one.offset) for one in found.messages]
                hidden = {}
                found.groups = consumers.find(connection, schema, event_id, refs, topics, hidden)
                found.unseen += [f"{schema}.{table} can't be read: {why}" for table, why in hidden.items()]
    except OutboxError as error:
        found.unseen.append(str(error))
        if not found.searched:
            search_kafka(topics)
    if found.messages:
        _read_message(found, settings, max(seconds, _READ_SECONDS))
    return found


def _read_message(found: Found, settings: Settings, seconds: float) -> None:
    """Read the event's first message: its time on Kafka, its contents, and what an event without a row was."""
    event, (first, *more) = found.event, found.messages
    try:
        place = Partition(first.topic, first.partition)
        record = record_at(client_options(settings), place, first.offset, seconds)
    except OutboxError as error:
        found.unseen.append(str(error))
        return
    # After a topic was created again, the offset is another message's.
    if record is None or record.event_id != str(event.event_id):
        found.gone = True
        return
    found.messages = [replace(first, at=time_of(record.milliseconds)), *more]
    headers = {name: _text(value) for name, value in (record.headers or {}).items()}
    found.contents = _contents(record, headers)
    if event.state == "unknown":
        found.event = replace(
            event,
            created_at=_time(headers.get(CE_TIME)) or written_at(event.event_id),
            aggregate_type=headers.get(AGGREGATE_TYPE),
            aggregate_id=None if record.key is None else _text(record.key),
            event_type=headers.get(CE_TYPE) or headers.get(EVENT_TYPE),
        )


def _contents(record: TopicRecord, headers: dict[str, str]) -> Contents:
    try:
        return Contents(None if record.value is None else record.value.decode(), None, headers)
    except UnicodeDecodeError:
        return Contents(None, record.value, headers)


def _text(value: str | bytes | None) -> str:
    """Return what another program may have written as text: bytes that are no UTF-8 as hexadecimal digits."""
    try:
        return value.decode() if isinstance(value, bytes) else value or ""
    except UnicodeDecodeError:
        return value.hex(" ") if isinstance(value, bytes) else ""


def _time(text: str | None) -> dt.datetime | None:
    try:
        time = dt.datetime.fromisoformat(text or "")
        return time.astimezone(dt.UTC) if time.tzinfo else None
    except (ValueError, OverflowError):
        return None


def _search(
    found: Found,
    settings: Settings,
    topics: Sequence[str],
    *,
    seconds: float,
    named: bool = False,
    since: dt.datetime | None = None,
) -> None:
    """Search Kafka for the event where no table names its message, or where topics are ``named``: it may have repeats.

    For an event that left no row, also all topics to which relays with these settings may write are searched.
    """
    found.searched = True
    event = found.event
    if not named and (found.messages or event.state not in {"published", "unknown"}):
        return
    written = event.created_at or written_at(event.event_id)
    if written is None or written > dt.datetime.now(dt.UTC):
        # The id has no time, or the writer made one up.
        written = dt.datetime.fromtimestamp(0, dt.UTC)
    try:
        options = client_options(settings)
        if not topics or (event.aggregate_type is None and not named):
            topics = sorted({*topics, *topics_of(options, build_router(settings).may_write)})
        if not topics:
            found.whole = False
            found.unseen.append(
                "no topic was looked through, as these settings' routes lead to none that exists: name one with --topic"
            )
            return
        messages, why = search(options, topics, event.event_id, since or written, seconds)
    except OutboxError as error:
        messages, why = [], str(error)
    if why is not None:
        found.whole = False
        found.unseen.append(why)
    seen = {(one.topic, one.partition, one.offset) for one in messages}
    known = [one for one in found.messages if (one.topic, one.partition, one.offset) not in seen]
    found.messages = [*known, *messages]


def _topics(settings: Settings, event: Event) -> list[str]:
    router = build_router(settings)
    if event.aggregate_type is None:
        return sorted({route.topic for route in (settings.routes or {}).values()})
    topic = router.known_topic(event.aggregate_type)
    return [] if topic is None else [topic]


def _relay_side(found: Found) -> list[Step]:
    event = found.event
    steps = []
    if event.created_at is not None:
        lane = "" if event.lane is None else f"lane {event.lane}"
        steps.append(Step("written", "good", event.created_at, text=lane))
    match event.state:
        case "scheduled":
            steps.append(Step("scheduled", "good", event.scheduled_at))
            steps.append(Step("is not published before", "unknown", event.not_before))
        case "waiting":
            before = "10,000 or more rows" if event.before == 10_000 else counted(event.before or 0, "row")
            holder = "and no relay" if event.owner is None else f"relay {event.owner}"
            text = f"{before} before it, {holder} holds the lane"
            steps.append(Step("waits to be published", "unknown", text=text))
        case "retrying":
            after = f"retrying, after {counted(event.attempts, 'failed attempt')}" + (
                "" if event.next_attempt_at is None else ", next"
            )
            steps.append(Step(after, "bad", event.next_attempt_at, text=event.last_error or ""))
        case "dead":
            text = f"after {counted(event.attempts, 'attempt')}: {event.last_error}"
            steps.append(Step("a dead letter since", "bad", event.dead_at, text=text))
    steps += _published(found)
    if event.state == "unknown" and not found.messages:
        steps.append(Step("the outbox has no row of it", "unknown"))
    return steps


def _published(found: Found) -> list[Step]:
    """Return the event's messages and its settlement, in the order of their times."""
    steps = []
    for number, message in enumerate(found.messages):
        text = f"{message.topic}-{message.partition} offset {message.offset}"
        if found.gone and number == 0:
            text += "; Kafka has it no longer: it was kept as long as its topic keeps messages"
        steps.append(Step("on Kafka", "good", message.at, text=text))
    if found.event.state == "published":
        steps.append(Step("published", "good", found.event.published_at))
    steps.sort(key=lambda step: step.at or _LAST)
    last = found.event.created_at
    for at, step in enumerate(steps):
        steps[at] = replace(step, milliseconds=_later(last, step.at))
        last = step.at or last
    return steps


def _consumers_side(found: Found) -> list[Step]:
    event = found.event
    published = next((one.at for one in found.messages if one.at), event.published_at)
    steps = []
    for group in found.groups:
        if group.state == "unknown" and event.state == "unknown":
            continue
        name = f"group {group.group}:"
        step = partial(Step, group=group.group)
        match group.state:
            case "applied":
                took = _later(published, group.applied_at)
                steps.append(step(f"{name} applied", "good", group.applied_at, took))
            case "dead":
                assert group.letter is not None
                letter = group.letter
                attempts = counted(letter.attempts, "attempt")
                text = f"{letter.reason}, {state_word(letter.state)}, {attempts}: {letter.error}"
                title = f"{name} dead letter {letter.id} since"
                steps.append(step(title, "bad", letter.died_at, text=text, letter=letter.id))
            case "given-up":
                text = "its effect failed, or is not known to have ended: see `outbox offsets show`"
                steps.append(step(f"{name} given up (at-most-once)", "bad", group.lost_at, text=text))
            case "waiting":
                text = "waits" if group.behind is None else f"waits, {counted(group.behind, 'offset')} before it"
                steps.append(step(f"{name} {text}", "unknown"))
            case "passed":
                text = (
                    "is beyond it, and remembers no id of it: a transform or `types` left it out, or ids are not kept"
                )
                steps.append(step(f"{name} {text}", "unknown"))
            case _:
                steps.append(step(f"{name} not seen yet", "unknown"))
        for one in group.external:
            state = {"confirmed": "good", "stuck": "bad", "cancelled": "bad"}.get(one.state, "unknown")
            title = f"{name} external {one.name}: {one.state}, {counted(one.attempts, 'attempt')}"
            steps.append(step(title, state, text=one.last_error or ""))
    return steps


def _later(before: dt.datetime | None, after: dt.datetime | None) -> float | None:
    """Return the milliseconds between two times; None if a clock that is behind gave the later one."""
    if before is None or after is None or after < before:
        return None
    return (after - before).total_seconds() * 1000
