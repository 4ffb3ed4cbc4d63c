"""Which topics an audit reads, and what it leaves out besides what was deleted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from outbox._app.settings import client_options
from outbox._clients.counting import counted
from outbox.errors import ConfigurationError
from relay.audit.findings import Audit, Scope
from relay.audit.groups import Group, Groups
from relay.audit.topics import Topics
from relay.config import Settings, shared_source_note
from relay.kafka.routing import Router
from relay.operations.trace import topics_of


def choose(
    settings: Settings, scope: Scope, router: Router, groups: Groups | None, known: Collection[str]
) -> tuple[set[str], set[str], set[str]]:
    """Return the topics to which events of this outbox go, those to read, which may be of another outbox too, and those
    of groups that are not read.

    known  topics that the outbox's tables name.

    Raises ConfigurationError if the group of the scope reads none of them.
    """
    found: Sequence[Group] = ()
    if groups is not None:
        with groups.snapshot():
            found = groups.groups(scope.topics)
    theirs = {topic for group in found for topic in group.topics}
    if scope.group is not None and not found:
        where = "" if scope.topics is None else f" in {', '.join(sorted(scope.topics))}"
        raise ConfigurationError(f"--group {scope.group}: there is no such group with positions{where}")
    if scope.topics is not None:
        return set(scope.topics), set(scope.topics), set()
    own = {*known, *scope.more, *(route.topic for route in (settings.routes or {}).values())}
    read = own | {topic for topic in theirs if router.may_write(topic) or topic in scope.former}
    if scope.group is not None and not theirs & read:
        raise ConfigurationError(f"--group {scope.group}: no route leads to what it reads; give --topic")
    return own, read or set(topics_of(client_options(settings), router.may_write)), theirs - read


def left_out(
    settings: Settings,
    scope: Scope,
    found: Audit,
    groups: Sequence[Group],
    topics: Topics,
    skipped: Collection[str],
    renamed: Collection[str],
) -> Iterator[str]:
    """Yield what is to be said of it.

    skipped   topics of groups that were not read.
    renamed   topics with records of this outbox that have another source.
    """
    for topic in sorted(found.absent):
        yield f"topic {topic} does not exist, or these credentials may not DESCRIBE it"
    yield from _of_groups(scope, groups)
    if skipped:
        names = ", ".join(sorted(skipped))
        yield f"groups read {names}, to which no route leads: not compared; if this outbox wrote there, give --topic"
    if scheduled := sum(one.scheduled for one in found.windows):
        yield f"{counted(scheduled, 'event')} scheduled: minutes are open until theirs are published"
    for topic, count in sorted(topics.others.items()):
        yield f"topic {topic} has {counted(count, 'record')} not of this outbox: not compared"
    for topic in sorted(renamed):
        yield f"topic {topic} has events of this outbox with another OUTBOX_CE_SOURCE: give that one for their minutes"
    for topic in sorted(topics.untimed):
        yield (
            f"topic {topic} has events whose ids have no time (UUIDv7), and OUTBOX_HEADERS=debezium sends none: "
            "these are not compared, nor is the ledger"
        )
    shared = shared_source_note(settings)
    if shared and any(one.kind == "unknown" for one in found.differences):
        yield shared


def _of_groups(scope: Scope, groups: Sequence[Group]) -> Iterator[str]:
    for name in sorted(set(scope.partial) - {group.name for group in groups}):
        yield f"--partial {name}: no such group reads what is compared"
    for group in groups:
        if not group.remembers:
            yield f"group {group.name} does not keep the id of each event (see Dedup): only its positions are known"
