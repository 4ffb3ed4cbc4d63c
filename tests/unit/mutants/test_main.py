"""``make mutants``: how long its runs may take."""

from __future__ import annotations

import importlib
import sys
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any


def test_the_run_of_all_tests_without_a_change_may_take_as_long_as_they_may_one_by_one(monkeypatch):
    # The module puts its own folder's parent there.
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = importlib.import_module("mutants.__main__")
    ran: list[tuple[int, float]] = []

    def run(arguments: list[str], *, timeout: float, **_: Any) -> CompletedProcess[str]:
        ran.append((len([one for one in arguments if one.startswith("tests/")]), timeout))
        return CompletedProcess(arguments, 1, "short test summary info\nFAILED one\n", "")

    monkeypatch.setattr(command, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(command, "_copy", lambda folder: folder)
    monkeypatch.setattr(sys, "argv", ["mutants"])
    assert command.main() == 2
    [(tests, limit)] = ran
    assert tests > 30
    assert limit == tests * command._LONGEST_SECONDS
