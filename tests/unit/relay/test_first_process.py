"""A command that is the first process of a container, for which Linux drops a signal without a handler."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import psutil
import pytest

from outbox.sandbox._process import patience

ISOLATED = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems drop no signal")
def test_it_ends_at_sigterm_while_a_server_does_not_answer():
    if subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody make a namespace of processes")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60 * patience())
        url = f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/x"
        command = [*ISOLATED, sys.executable, "-m", "relay.cli", "db", "check"]
        with subprocess.Popen(command, env={**os.environ, "OUTBOX_DATABASE_URL": url}) as starter:
            try:
                with silent.accept()[0]:
                    [first] = psutil.Process(starter.pid).children()
                    first.terminate()
                    assert starter.wait(60 * patience()) == 143
            finally:
                starter.kill()
