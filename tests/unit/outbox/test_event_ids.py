"""Ids of processes that were forked from one: gunicorn --preload and Celery's prefork make events in each of them."""

from __future__ import annotations

import subprocess
import sys

CHILDREN, EACH = 6, 5000

# In a process of its own: this one has threads, which a fork would leave behind.
FORKS = """
import os, sys
from outbox import Event
from outbox.event import id_of

def ids():
    return [id_of(Event("Order", "1", "T")).hex for _ in range(int(sys.argv[2]))]

# The parent's generator has a state that every child inherits.
ids()
readers = []
for _ in range(int(sys.argv[1])):
    reader, writer = os.pipe()
    if os.fork() == 0:
        with os.fdopen(writer, "w") as out:
            out.write("\\n".join(ids()))
        os._exit(0)
    os.close(writer)
    readers.append(reader)
print("\\n".join(ids()))
for reader in readers:
    with os.fdopen(reader) as found:
        print(found.read())
"""


def test_forked_processes_make_ids_of_their_own():
    """The random parts are compared, which have to differ whether or not two ids are of one millisecond."""
    command = [sys.executable, "-W", "error", "-c", FORKS, str(CHILDREN), str(EACH)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    made = done.stdout.split()
    assert len(made) == len(set(made)) == (CHILDREN + 1) * EACH
    assert len({one[-15:] for one in made}) == len(made)
