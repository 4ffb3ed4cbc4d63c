"""The outbox's tables as models that only read. Their tables are made by the revisions in migrations/.

``id`` is unique in each table, so it serves as the primary key, which the database has on (lane, id).
"""

from __future__ import annotations

from typing import Any, NoReturn

from django.db import models
from django.db.models.signals import pre_delete, pre_save

from outbox.django.conf import options
from outbox.errors import OperationRefused


def _table(name: str) -> str:
    """Return a table's name with its schema; Django leaves a quoted name as it is. Its statements are templates."""
    schema = options().schema.replace('"', '""').replace("%", "%%")
    return f'"{schema}"."{name}"'


def _refuse(sender: type[models.Model], **_: Any) -> NoReturn:
    raise OperationRefused(
        f"the model {sender.__name__} only reads, and nothing was written: write events with outbox.django.outbox, act "
        "on them with the command `outbox`, and leave the model out of fixtures"
    )


class _QuerySet(models.QuerySet):
    """Refuses what writes without a signal; ``create`` and the like save a row, which sends one."""

    def delete(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self.model)

    update = bulk_create = bulk_update = delete


class _Manager(models.Manager.from_queryset(_QuerySet)):  # type: ignore[misc]
    """Reads from the database that has the tables."""

    def get_queryset(self) -> Any:
        return super().get_queryset().using(options().database)


class _UndumpedManager(_Manager):
    """What goes through the models of a project with it, naming a database, finds no rows: dumpdata, with --all too.

    A dump would write lanes back that relays have taken since, and events that are published.
    """

    def using(self, _alias: str | None) -> Any:
        return self.none()


class Time(models.DateTimeField):
    """A time; None for one that Python has no date for, as infinity."""

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        within = "BETWEEN '0001-01-02'::timestamptz AND '9999-12-30'::timestamptz"
        return f"CASE WHEN {sql} {within} THEN {sql} END", [*params, *params]


class _Table(models.Model):
    objects = _Manager()
    undumped = _UndumpedManager()

    class Meta:
        abstract = True
        managed = False
        base_manager_name = default_manager_name = "undumped"
        default_permissions = ("view",)

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        # loaddata calls no method of ours. Not for all senders: Django deletes faster where no receiver is.
        for signal in (pre_save, pre_delete):
            signal.connect(_refuse, sender=cls)


class _Event(_Table):
    id = models.BigIntegerField(primary_key=True)
    event_id = models.UUIDField()
    aggregate_type = models.TextField()
    aggregate_id = models.TextField()
    event_type = models.TextField()
    # JSON as text: a float is not what the database has.
    payload = models.TextField(null=True)
    payload_bytes = models.BinaryField(null=True)
    headers = models.TextField(null=True)

    class Meta(_Table.Meta):
        abstract = True

    def __str__(self) -> str:
        return f"{self.event_type} of {self.aggregate_type}/{self.aggregate_id}"


class WaitingEvent(_Event):
    """An event that is not published yet."""

    lane = models.SmallIntegerField()
    created_at = Time()

    class Meta(_Event.Meta):
        db_table = _table("events")
        ordering = ("lane", "id")
        # Of all events, wherever they wait: outbox.view_contents.
        permissions = (("view_contents", "Can view payloads and headers of events"),)


class ScheduledEvent(_Event):
    """An event that waits for its time."""

    not_before = Time()
    scheduled_at = Time()

    class Meta(_Event.Meta):
        db_table = _table("scheduled")
        ordering = ("not_before", "id")


class DeadLetter(_Event):
    """An event that failed for good."""

    lane = models.SmallIntegerField()
    created_at = Time()
    attempts = models.IntegerField()
    last_error = models.TextField()
    first_failed_at = Time()
    dead_at = Time()

    class Meta(_Event.Meta):
        db_table = _table("dead_letters")
        ordering = ("lane", "id")


class Failure(_Table):
    """What has kept a waiting event from being published. ``next_attempt_at`` None: it waits for an operator."""

    id = models.BigIntegerField(primary_key=True)
    lane = models.SmallIntegerField()
    event_id = models.UUIDField()
    aggregate_type = models.TextField()
    aggregate_id = models.TextField()
    blocks = models.BooleanField()
    attempts = models.IntegerField()
    last_error = models.TextField()
    first_failed_at = Time()
    last_failed_at = Time()
    next_attempt_at = Time(null=True)

    class Meta(_Table.Meta):
        db_table = _table("failures")
        ordering = ("lane", "id")

    def __str__(self) -> str:
        return f"{self.aggregate_type}/{self.aggregate_id}: {self.last_error}"


class Lane(_Table):
    """A share of the keys, and who publishes it. ``lease_until`` None: no relay has held it yet."""

    lane = models.SmallIntegerField(primary_key=True)
    owner = models.TextField(null=True)
    epoch = models.BigIntegerField()
    lease_until = Time(null=True)
    source = models.TextField()

    class Meta(_Table.Meta):
        db_table = _table("lanes")
        ordering = ("lane",)

    def __str__(self) -> str:
        return f"lane {self.lane}"
