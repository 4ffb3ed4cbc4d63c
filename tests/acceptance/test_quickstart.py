"""README's quickstart, typed as it stands, with the package that is here already. `make test-dist` installs it too."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quickstart_support import ROOT, empty_home, quickstart, type_in


@pytest.fixture
def home() -> Iterator[Path]:
    with empty_home() as made:
        yield made


# Found before the real one: a relay that is slow to start, for as long as nothing waits for what it publishes.
SLOW_RELAY = """#!/usr/bin/env bash
case "$1 $2" in
"relay run") until [ -e {home}/waited ]; do sleep 0.1; done ;;
"relay wait") touch {home}/waited ;;
esac
exec {outbox} "$@"
"""


@pytest.mark.spark
def test_the_quickstart_works_as_it_is_typed(home):
    """README.md, without its first block."""
    typed, _, _ = quickstart()
    assert "pip install 'outbox-kafka[spark,sandbox]'" in typed[0]
    scripts = Path(sys.executable).parent
    slow = home / "slow" / "outbox"
    slow.parent.mkdir()
    slow.write_text(SLOW_RELAY.format(home=home, outbox=scripts / "outbox"))
    slow.chmod(0o755)
    path = os.pathsep.join([str(slow.parent), str(scripts), os.environ["PATH"]])
    type_in(home, typed[1:], {"PATH": path, "PYTHONPATH": str(ROOT)}, 180)
