"""A project with the app: it writes events and looks at them in the admin, under Django's own test runner."""

from __future__ import annotations

from django_support import Project

from outbox.testing.fixtures import token


def test_under_djangos_test_runner(outbox_postgres_server):
    """The runner makes a database of its own, by migrating it."""
    project = Project(default=outbox_postgres_server.url())
    project.databases["default"]["TEST"] = {"NAME": f"test_{token()}"}
    assert "\nOK\n" in project.manage("test", "cases")
