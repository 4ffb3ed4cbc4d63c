"""Members that were made before a fork: each process has a name of its own in Kafka and in the consumers' tables."""

from __future__ import annotations

import subprocess
import sys

FORKED = """
import os
from contextlib import suppress

from outbox.inbox import Consumer, consumer
from outbox.transform import Transformer, transformer

def show(name):
    print(os.getpid(), name, flush=True)
    raise SystemExit

transformer.Session = lambda plan, *_: show(plan.producer["transactional.id"])
consumer.Member = lambda settings, *_: show(settings.group._owner)
kafka = {"bootstrap.servers": "127.0.0.1:1"}
first = Transformer(lambda _: [], topics=["t"], group="g", kafka=kafka)
second = Consumer("", ["t"], group="g", kafka=kafka)
if child := os.fork():
    os.waitpid(child, 0)
for run in (first.run, lambda: second.run(print)):
    with suppress(SystemExit):
        run()
"""


def test_each_has_its_own_name():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert len(found) == len({name for _, name in found}) == 4
    assert [name.endswith(pid) for pid, name in found] == [True] * 4
