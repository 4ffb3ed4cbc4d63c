"""A Django project for tests. Each program has a process of its own, in which Django is set up once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from psycopg.conninfo import conninfo_to_dict

from outbox.sandbox._process import patience

ROOT: Final = Path(__file__).parents[2]
PROJECT: Final = ROOT / "tests" / "integration" / "outbox" / "django" / "project"

EACH: Final = """
import contextlib, io, json, sys
from django.core.management import ManagementUtility
found = []
for words in json.loads(sys.argv[1]):
    text, status = io.StringIO(), 0
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            ManagementUtility(["manage.py", *words]).execute()
        except SystemExit as ended:
            status = ended.code or 0
    found.append((status, text.getvalue()))
print(json.dumps(found))
"""


class Project:
    """The project with these databases, by alias: the first is the default."""

    def __init__(self, outbox: dict[str, Any] | None = None, /, **urls: str) -> None:
        self.urls = urls
        self.databases = {alias: database(url) for alias, url in urls.items()}
        self.outbox = outbox or {}
        self.migration_modules: dict[str, str] = {}
        self.path: list[str] = []

    def python(self, *words: str) -> str:
        """Run Python to its end, and return what it prints."""
        settings = {"DATABASES": self.databases, "OUTBOX": self.outbox, "MIGRATION_MODULES": self.migration_modules}
        done = subprocess.run(
            [sys.executable, "-W", "error", *words],
            env=os.environ
            | {f"DJANGO_{name}": json.dumps(value) for name, value in settings.items()}
            | {
                "DJANGO_SETTINGS_MODULE": "settings",
                "PYTHONPATH": os.pathsep.join([*self.path, str(PROJECT), str(ROOT)]),
            },
            capture_output=True,
            text=True,
            timeout=60 * patience(),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def manage(self, *words: str) -> str:
        """Run a command of manage.py."""
        return self.python("-m", "django", *words)

    def manage_each(self, *commands: str) -> list[tuple[int, str]]:
        """Run commands of manage.py one after the other in one process; return the status and the output of each."""
        lines: list[list[Any]] = json.loads(self.python("-c", EACH, json.dumps([words.split() for words in commands])))
        return [(status, text) for status, text in lines]

    def call(self, function: str, *values: str) -> str:
        """Call a function of one of the project's modules with texts."""
        module = function.partition(".")[0]
        return self.python("-c", f"import django; django.setup(); import {module}; {function}(*{values!r})")


def database(url: str) -> dict[str, Any]:
    """Return a database as Django's settings have it."""
    parts = {name.upper().replace("DBNAME", "NAME"): value for name, value in conninfo_to_dict(url).items()}
    return {"ENGINE": "django.db.backends.postgresql", **parts}
