"""Tests of Django's own runner, which test_project.py starts."""

from __future__ import annotations

import asyncio
import datetime as dt
import re
from typing import Any
from unittest import mock

from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import Permission, User
from django.db import IntegrityError, connection, connections, transaction
from django.db.models import Model
from django.db.transaction import TransactionManagementError
from django.test import TestCase, TransactionTestCase, override_settings
from django.test.utils import CaptureQueriesContext

from outbox import Event, EventError, Outbox, TargetError
from outbox.django import DjangoOutbox, outbox
from outbox.django.apps import check_settings
from outbox.django.models import DeadLetter, Failure, Lane, ScheduledEvent, WaitingEvent
from outbox.errors import OperationRefused
from outbox.testing import recorded_events

ROWS = 25_000


def event(number: int = 1, **headers: str) -> Event:
    return Event("Order", number, "OrderPlaced", {"n": number}, headers=headers)


def written() -> list[str]:
    return [each.aggregate_id for each in recorded_events(connection.connection)]


class Writing(TestCase):
    def test_in_nested_blocks(self) -> None:
        with transaction.atomic():
            outbox.add(event(1))
            with self.assertRaises(ZeroDivisionError), transaction.atomic():
                outbox.add(event(2))
                raise ZeroDivisionError
            with transaction.atomic():
                outbox.add_many([event(3), event(4)], lock_key=True)
        Outbox().add(connection.connection, event(5))
        self.assertEqual(written(), ["1", "3", "4", "5"])

    def test_isolated_from_the_other_tests(self) -> None:
        """Each of them writes order 1, as this one does."""
        self.assertEqual(written(), [])
        outbox.add(event(1))
        self.assertEqual(written(), ["1"])

    def test_scheduled(self) -> None:
        outbox.check()
        event_id = outbox.add(event(), delay=dt.timedelta(hours=1))
        self.assertTrue(outbox.reschedule(event_id, delay=dt.timedelta(hours=2)))
        self.assertTrue(outbox.cancel(event_id))
        self.assertFalse(outbox.cancel(event_id))

    def test_with_options_of_the_outbox(self) -> None:
        DjangoOutbox(headers={"tenant": "t1"}).add(event())
        self.assertEqual(WaitingEvent.objects.get().headers, '{"tenant": "t1"}')

    def test_errors_are_those_of_django(self) -> None:
        with self.assertRaises(EventError):
            outbox.add(Event("Order", "", "T"))
        with self.assertRaises(IntegrityError), transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("ALTER TABLE outbox.events ADD CONSTRAINT refused CHECK (aggregate_id <> '1')")
            outbox.add(event(1))
        self.assertEqual(written(), [])
        with transaction.atomic():
            transaction.set_rollback(True)
            with self.assertRaises(TransactionManagementError):
                outbox.add(event(1))
            transaction.set_rollback(False)


class Committing(TransactionTestCase):
    def tearDown(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM outbox.events")

    def test_refused_outside_of_a_block(self) -> None:
        for _ in ("not connected", "connected"):
            with self.assertRaisesRegex(TargetError, r"transaction\.atomic\(using='default'\)"):
                outbox.add(event())
        with connection.cursor() as cursor:
            for target in (connection, connection.connection, cursor):
                with self.assertRaisesRegex(
                    TargetError, r"django\.db\.connection\.connection inside transaction\.atomic"
                ):
                    Outbox().add(target, event())
        self.assertEqual(WaitingEvent.objects.count(), 0)

    async def test_in_a_view_that_is_asynchronous(self) -> None:
        @transaction.atomic
        def place(number: int) -> None:
            outbox.add(event(number))
            if number == 2:
                raise ZeroDivisionError

        answers = await asyncio.gather(*map(sync_to_async(place), (1, 2, 3)), return_exceptions=True)
        self.assertIsInstance(answers[1], ZeroDivisionError)
        found = [each.aggregate_id async for each in WaitingEvent.objects.all()]
        self.assertEqual(sorted(found), ["1", "3"])


class Models(TestCase):
    def test_they_refuse_every_write(self) -> None:
        outbox.add(event())
        lane, waiting = Lane.objects.get(lane=0), WaitingEvent.objects.get()
        new = Lane(lane=9, epoch=9, source="wal")
        before = list(Lane.objects.values()), list(WaitingEvent.objects.values())
        rows = Lane.objects.all()
        for name, write in {
            "save": lane.save,
            "save of some fields": lambda: lane.save(update_fields=["epoch"]),
            "save a new one": new.save,
            "raw": lambda: lane.save_base(raw=True),
            "as loaddata": lambda: Model.save_base(lane, raw=True, using="default"),
            "delete": waiting.delete,
            "all": rows.delete,
            "none": rows.none().delete,
            "update": lambda: rows.update(epoch=9),
            "of the manager": lambda: Lane.objects.update(epoch=9),
            "of the default manager": lambda: Lane._default_manager.update(epoch=9),
            "of the base manager": lambda: Lane._base_manager.all().delete(),
            "create": lambda: Lane.objects.create(lane=9, epoch=9),
            "bulk_create": lambda: Lane.objects.bulk_create([new]),
            "bulk_update": lambda: Lane.objects.bulk_update([lane], ["epoch"]),
            "get_or_create": lambda: Lane.objects.get_or_create(lane=9, defaults={"epoch": 9}),
            "update_or_create": lambda: Lane.objects.update_or_create(lane=0, defaults={"epoch": 9}),
            "asave": lambda: async_to_sync(lane.asave)(),
            "adelete": lambda: async_to_sync(rows.adelete)(),
            "aupdate": lambda: async_to_sync(rows.aupdate)(epoch=9),
            "abulk_create": lambda: async_to_sync(rows.abulk_create)([new]),
        }.items():
            refused = self.assertRaisesRegex(OperationRefused, "only reads, and nothing was written")
            with self.subTest(name), refused, transaction.atomic():
                write()
        self.assertEqual((list(Lane.objects.values()), list(WaitingEvent.objects.values())), before)

    def test_reading_by_all_managers(self) -> None:
        event_id = outbox.add(event())
        for manager in (WaitingEvent.objects, WaitingEvent._default_manager, WaitingEvent._base_manager):
            self.assertEqual(manager.get().event_id, event_id)
        self.assertEqual(WaitingEvent.objects.using("default").get().event_id, event_id)
        deferred = WaitingEvent.objects.defer("payload").get()
        self.assertEqual(deferred.payload, '{"n": 1}')
        deferred.refresh_from_db()


class Settings(TestCase):
    def problems(self, given: Any) -> list[str]:
        with override_settings(OUTBOX=given):
            return [f"{each.id} {each.msg}" for each in check_settings()]

    def test_bad_settings(self) -> None:
        for given, wanted in (
            ({}, ""),
            ({"SCHEMA": "events", "LANES": 256, "DATABASE": "default"}, ""),
            (["SCHEMA"], "outbox.E001 OUTBOX must be a dict, not list"),
            (
                {"SCHEME": "x"},
                r"outbox.E001 OUTBOX has 'SCHEME': 'x', and takes SCHEMA \(str\), LANES \(int\), DATABASE \(str\)",
            ),
            ({"SCHEMA": 5}, "outbox.E001 OUTBOX has 'SCHEMA': 5, and takes"),
            ({"SCHEMA": "pg_outbox"}, "outbox.E001 OUTBOX: .*Postgres's own"),
            ({"LANES": True}, "outbox.E001 OUTBOX has 'LANES': True, and takes"),
            ({"LANES": 257}, "outbox.E001 OUTBOX: lanes must be 1 to 256, not 257"),
            ({"DATABASE": "other"}, r"outbox.E002 .*'other': DATABASES has no such alias; choose from default"),
        ):
            with self.subTest(given=given):
                found = self.problems(given)
                self.assertEqual(len(found), 1 if wanted else 0, found)
                self.assertRegex("".join(found), f"^({wanted})")

    def test_other_databases_and_drivers(self) -> None:
        with mock.patch.object(connections["default"], "vendor", "sqlite"):
            self.assertRegex("".join(self.problems({})), r"outbox\.E002 .*the outbox lives in Postgres")
        with mock.patch("django.db.backends.postgresql.psycopg_any.is_psycopg3", False):
            self.assertRegex("".join(self.problems({})), r"outbox\.E002 .*the driver must be psycopg 3")


def nodes(plan: Any) -> list[Any]:
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


class Admin(TestCase):
    """With 25,000 rows in each table."""

    @classmethod
    def setUpTestData(cls) -> None:
        cls.admin = User.objects.create_superuser("ann", password="ann")
        columns = "event_id, aggregate_type, aggregate_id, event_type, payload"
        values = "gen_random_uuid(), 'Order', n::text, 'OrderPlaced', '{\"price\": 1.10}'::jsonb"
        due = "now() + n * '1 s'::interval"
        series = f"generate_series(1, {ROWS}) AS n"
        failed = "lane, id, event_id, aggregate_type, aggregate_id"
        with connection.cursor() as cursor:
            cursor.execute(f"INSERT INTO outbox.events ({columns}) SELECT {values} FROM {series}")
            cursor.execute(f"INSERT INTO outbox.scheduled ({columns}, not_before) SELECT {values}, {due} FROM {series}")
            cursor.execute(
                f"INSERT INTO outbox.dead_letters ({failed}, event_type, payload, created_at, attempts, last_error,"
                f" first_failed_at) SELECT {failed}, event_type, payload, created_at, 1, '<refused>', now()"
                " FROM outbox.events"
            )
            cursor.execute(
                f"INSERT INTO outbox.failures ({failed}, blocks, attempts, last_error, first_failed_at,"
                f" last_failed_at, next_attempt_at) SELECT {failed}, true, 1, '<refused>', now(), now(), 'infinity'"
                " FROM outbox.events"
            )
            cursor.execute("ANALYZE outbox.events, outbox.scheduled, outbox.dead_letters, outbox.failures")

    def setUp(self) -> None:
        self.client.force_login(self.admin)

    def page(self, path: str, *, most: int = 1000) -> str:
        """Return a page whose statements are few. They read at most so many rows, and by an index unless it is all."""
        with CaptureQueriesContext(connection) as queries:
            answer = self.client.get(f"/admin/outbox/{path}")
        self.assertEqual(answer.status_code, 200)
        ours = [query["sql"] for query in queries if '"outbox".' in query["sql"]]
        self.assertLessEqual(len(ours), 5)
        self.assertEqual([each for each in ours if "payload" in each and "/change/" not in path], [])
        for statement in ours:
            with connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}")
                plan = cursor.fetchone()[0][0]["Plan"]
            for node in nodes(plan):
                read = node["Actual Rows"] * node["Actual Loops"] + node.get("Rows Removed by Filter", 0)
                self.assertLessEqual(read, most, (statement, node))
                if node["Node Type"] == "Seq Scan" and most < ROWS:
                    self.assertEqual(node["Relation Name"], "lanes", statement)
        return answer.content.decode()

    def test_lists_and_their_last_pages(self) -> None:
        for name in ("waitingevent", "scheduledevent", "deadletter", "failure"):
            with self.subTest(name):
                first = self.page(f"{name}/")
                self.assertIn("1000 ", first)
                self.assertFalse({f"{name}/add/", "1.10"} & set(re.findall(r"\w+/add/|1\.10", first)))
                self.assertEqual(len(re.findall('<th class="field-id', first)), 100)
                self.assertEqual(len(re.findall('<th class="field-id', self.page(f"{name}/?p=10"))), 100)
                self.assertEqual(len(re.findall('<th class="field-id', self.page(f"{name}/?all="))), 100)
                # Django sorts by any column that the address names, whatever its pages offer.
                self.page(f"{name}/?o=-5.2.-1")
        self.assertEqual(len(re.findall('<th class="field-lane', self.page("lane/"))), 4)

    def test_searches(self) -> None:
        for name in ("waitingevent", "scheduledevent", "deadletter", "failure"):
            with self.subTest(name):
                model = {"w": WaitingEvent, "s": ScheduledEvent, "d": DeadLetter, "f": Failure}[name[0]]
                wanted = model.objects.get(aggregate_id="20000")
                no_index = name in {"waitingevent", "failure"}
                by_id = self.page(f"{name}/?q={wanted.event_id}", most=ROWS if no_index else 4)
                self.assertEqual(re.findall('<td class="field-aggregate_id">(.*?)<', by_id), ["20000"])
                if name == "scheduledevent":
                    continue
                by_key = self.page(f"{name}/?q=Order/20000", most=ROWS // 4 + 500)  # its lane
                self.assertEqual(re.findall('<td class="field-event_id">(.*?)<', by_key), [str(wanted.event_id)])
                self.assertIn("a key as TYPE/ID", self.page(f"{name}/?q=20000"))
                in_lane = self.page(f"{name}/?lane=2")
                self.assertEqual(set(re.findall('<td class="field-lane">(.*?)<', in_lane)), {"2"})

    def test_one_event(self) -> None:
        for name, model in (
            ("waitingevent", WaitingEvent),
            ("scheduledevent", ScheduledEvent),
            ("deadletter", DeadLetter),
        ):
            with self.subTest(name):
                shown = self.page(f"{name}/{model.objects.get(aggregate_id='20000').pk}/change/")
                self.assertIn("<pre>{\n    &quot;price&quot;: 1.10\n}</pre>", shown)
                self.assertNotIn('type="submit" value="Save', shown)
        failure = self.page(f"failure/{Failure.objects.get(aggregate_id='20000').pk}/change/")
        self.assertIn("waits for an operator", failure)
        self.assertIn("&lt;refused&gt;", failure)
        self.assertIn("lane 3", self.page("lane/3/change/"))
        self.assertIsNone(Lane.objects.get(lane=0).lease_until)

    def test_payloads_of_all_kinds(self) -> None:
        for payload, shown in (
            (b"plain <text>", "<pre>plain &lt;text&gt;</pre>"),
            (b"\xff" * 1001, "<pre>1,001 bytes: ff ff"),
            (None, "<pre>a tombstone</pre>"),
        ):
            event_id = outbox.add(Event("Order", 1, "T", payload, headers={"tenant": "t1"}))
            page = self.page(f"waitingevent/{WaitingEvent.objects.get(event_id=event_id).pk}/change/")
            self.assertIn(shown, page)
            self.assertIn("&quot;tenant&quot;: &quot;t1&quot;", page)

    def test_contents_are_for_users_who_may_see_them(self) -> None:
        user = User.objects.create_user("bob", is_staff=True)
        seen = Permission.objects.filter(content_type__app_label="outbox").exclude(codename="view_contents")
        user.user_permissions.set(seen)
        self.client.force_login(user)
        outbox.add(Event("Order", "secret", "T", {"price": 1.10}, headers={"tenant": "t1"}))
        paths = [
            f"/admin/outbox/{model._meta.model_name}/{model.objects.order_by('-id')[0].pk}/change/"
            for model in (WaitingEvent, ScheduledEvent, DeadLetter)
        ]
        for path in paths:
            with self.subTest(path), CaptureQueriesContext(connection) as queries:
                page = self.client.get(path).content.decode()
                self.assertIn("field-event_id", page)
                self.assertEqual(
                    re.findall("<pre>|price|tenant|field-(?:contents|header_lines|payload|headers)", page), []
                )
                self.assertEqual([each for each in queries if re.search("payload|headers", each["sql"])], [])
        for lookup in ("payload__contains=price", "headers__contains=tenant", "event_type=T"):
            self.assertEqual(self.client.get(f"/admin/outbox/waitingevent/?{lookup}").status_code, 400)
        user.user_permissions.add(Permission.objects.get(codename="view_contents"))
        for path in paths:
            with self.subTest(path):
                self.assertIn("&quot;price&quot;", self.client.get(path).content.decode())
        self.assertIn("&quot;tenant&quot;: &quot;t1&quot;", self.client.get(paths[0]).content.decode())

    def test_nothing_can_be_changed(self) -> None:
        pk = WaitingEvent.objects.all()[:1].get().pk
        for path in (f"{pk}/change/", f"{pk}/delete/", "add/"):
            answer = self.client.post(f"/admin/outbox/waitingevent/{path}", {"aggregate_id": "x"})
            self.assertEqual(answer.status_code, 403)
        self.assertEqual(self.client.get("/admin/outbox/waitingevent/x/change/").status_code, 302)
        self.assertFalse(self.admin.user_permissions.model.objects.filter(codename="delete_waitingevent").exists())
