"""The admin's lists of waiting and scheduled events, failures, dead letters and lanes. All is read-only.

No page counts or sorts a table: each list is in the order of an index and ends after its first rows. Payloads are read
for one event at a time, and for users who may see them. A search uses an index, except for an event's id among waiting
events and failures, which have none on it: Postgres reads the table, as for `outbox trace`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import Func, QuerySet, TextField
from django.db.models.expressions import RawSQL
from django.utils.html import format_html

from outbox.django.models import DeadLetter, Failure, Lane, ScheduledEvent, WaitingEvent

_MOST: Final = 1000
_EVENT: Final = ("event_id", "aggregate_type", "aggregate_id")
_ENDS: Final = f"The list ends after {_MOST:,} rows."


class FirstRows(Paginator):
    """The pages of the first rows."""

    @cached_property
    def count(self) -> int:
        return int(self.object_list[:_MOST].count())


class _InOrder(ChangeList):
    """A list in its model's order. ``sortable_by`` takes away the links, but not what an address asks for."""

    def get_ordering(self, *_: Any) -> list[Any]:
        return list(self.lookup_opts.ordering)


class _ReadOnly(admin.ModelAdmin):
    actions = None
    sortable_by = ()
    paginator = FirstRows
    show_full_result_count = False
    list_max_show_all = 0

    def get_changelist(self, *_: Any, **__: Any) -> type[ChangeList]:
        return _InOrder

    def has_add_permission(self, *_: Any, **__: Any) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def lookup_allowed(self, lookup: str, _value: object, request: Any = None) -> bool:
        # Others would read whole tables, and say of a payload whether it has a text.
        return lookup == _LaneFilter.parameter_name


class _OfEvents(_ReadOnly):
    """A table that has events by their ids."""

    search_fields = ("event_id",)
    search_help_text = f"An event's id. {_ENDS}"

    def get_search_results(self, request: Any, queryset: QuerySet, search_term: str) -> tuple[QuerySet, bool]:
        try:
            return (queryset.filter(event_id=UUID(search_term)) if search_term else queryset), False
        except ValueError:
            return self.search_others(request, queryset, search_term), False

    def search_others(self, request: Any, queryset: QuerySet, _term: str) -> QuerySet:
        """Return what is found by what is not an id."""
        messages.warning(request, self.search_help_text)
        return queryset.none()

    def get_object(self, request: Any, object_id: str, _from_field: str | None = None) -> Any:
        return self.one(request).filter(pk=object_id).first() if object_id.isdecimal() else None

    def one(self, request: Any) -> QuerySet:
        """Return the queryset from which one row is read."""
        return self.get_queryset(request)


class _LaneFilter(admin.SimpleListFilter):
    """Its choices are from the lanes' own table."""

    title = parameter_name = "lane"

    def lookups(self, *_: Any) -> list[tuple[str, str]]:
        return [(str(lane), str(lane)) for lane in Lane.objects.values_list("lane", flat=True)]

    def queryset(self, _request: Any, queryset: QuerySet) -> QuerySet:
        return queryset.filter(lane=self.value()) if (self.value() or "").isdecimal() else queryset


class _InLanes(_OfEvents):
    """A table whose primary key begins with the lane, and all events of a key are in one lane."""

    list_filter: Any = (_LaneFilter,)
    search_help_text = f"An event's id, or a key as TYPE/ID. {_ENDS}"

    def search_others(self, request: Any, queryset: QuerySet, term: str) -> QuerySet:
        kind, slash, key = term.partition("/")
        if not slash:
            return super().search_others(request, queryset, term)
        from outbox.tables import lane_expression

        names = "(VALUES (%s::text, %s::text)) AS of_key (aggregate_type, aggregate_id)"
        lane = RawSQL(f"SELECT {lane_expression(Lane.objects.count())} FROM {names}", (kind, key))
        return queryset.filter(lane=lane, aggregate_type=kind, aggregate_id=key)

    def one(self, request: Any) -> QuerySet:
        return super().one(request).filter(lane__in=Lane.objects.values("lane"))


class _WithContents(_OfEvents):
    """A table that has whole events. Their contents are read and shown with the permission outbox.view_contents."""

    exclude = ("payload", "payload_bytes", "headers")
    readonly_fields = ("contents", "header_lines")

    def get_queryset(self, request: Any) -> QuerySet:
        return super().get_queryset(request).defer(*self.exclude)

    def get_readonly_fields(self, request: Any, _event: Any = None) -> tuple[str, ...]:
        return self.readonly_fields if request.user.has_perm("outbox.view_contents") else ()

    def one(self, request: Any) -> QuerySet:
        found = super().one(request)
        if not self.get_readonly_fields(request):
            return found
        # The server prints every digit of a number.
        shown = {
            f"{name}_shown": Func(name, function="jsonb_pretty", output_field=TextField())
            for name in ("payload", "headers")
        }
        return found.defer(None).annotate(**shown)

    @admin.display(description="payload")
    def contents(self, event: Any) -> str:
        if event.payload_bytes is None:
            return _block(event.payload_shown or "a tombstone")
        found = bytes(event.payload_bytes)
        try:
            return _block(found.decode())
        except UnicodeDecodeError:
            return _block(f"{len(found):,} bytes: {found[:1000].hex(' ')}" + ("…" if len(found) > 1000 else ""))

    @admin.display(description="headers")
    def header_lines(self, event: Any) -> str:
        return _block(event.headers_shown or "none")


def _block(text: str) -> str:
    """Return text as a block that keeps its line breaks."""
    return str(format_html("<pre>{}</pre>", text))


@admin.register(WaitingEvent)
class WaitingEvents(_WithContents, _InLanes):
    list_display = ("id", "lane", *_EVENT, "event_type", "created_at")


@admin.register(ScheduledEvent)
class ScheduledEvents(_WithContents):
    list_display = ("id", *_EVENT, "event_type", "not_before", "scheduled_at")


@admin.register(DeadLetter)
class DeadLetters(_WithContents, _InLanes):
    list_display = ("id", "lane", *_EVENT, "event_type", "attempts", "last_error", "dead_at")


@admin.register(Failure)
class Failures(_InLanes):
    list_display = ("id", "lane", *_EVENT, "blocks", "attempts", "last_error", "next_attempt")
    exclude = ("next_attempt_at",)
    readonly_fields = ("next_attempt",)

    @admin.display(description="next attempt")
    def next_attempt(self, failure: Any) -> Any:
        return failure.next_attempt_at or "waits for an operator"


@admin.register(Lane)
class Lanes(_ReadOnly):
    list_display = ("lane", "owner", "epoch", "lease_until", "source")
