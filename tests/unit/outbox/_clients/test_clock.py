"""The clock of leases."""

from __future__ import annotations

import subprocess
import sys

import pytest

_AHEAD = "import time; from outbox._clients.clock import uptime; print(uptime() - time.monotonic())"


@pytest.mark.skipif(sys.platform != "linux", reason="another clock there")
def test_it_counts_what_the_machine_was_suspended():
    """In a namespace whose time since boot has 1,000 seconds more, and whose monotonic clock has not."""
    isolated = ["unshare", "--user", "--map-root-user", "--time", "--boottime"]
    counted = []
    for seconds in ("0", "1000"):
        done = subprocess.run([*isolated, seconds, sys.executable, "-c", _AHEAD], capture_output=True, text=True)
        if done.returncode and "unshare" in done.stderr:
            pytest.skip(f"time namespaces are not permitted here: {done.stderr}")
        assert done.returncode == 0, done.stderr
        counted.append(float(done.stdout))
    assert counted[1] - counted[0] == pytest.approx(1000.0, abs=1.0)
