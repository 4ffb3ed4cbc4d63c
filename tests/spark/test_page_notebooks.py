"""docs/guides/notebooks.md does what it says: its examples run, in their order, in one namespace."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from bench import Bench, ided
from support import wait_until

pytestmark = pytest.mark.spark

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "notebooks.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def in_windows(bench: Bench) -> int:
    if bench.rows("SELECT to_regclass('windows') IS NULL") == [(True,)]:
        return 0
    # Each window is written once, which its primary key says too.
    return bench.rows("SELECT count(*) FROM windows WHERE total IS NOT NULL")[0][0]


def test_the_examples_run(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OUTBOX_DATABASE_URL", bench.database.url)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", bench.topics.bootstrap_servers)
    for status in ("placed", "paid"):
        value = json.dumps({"order_id": "o1", "status": status}).encode()
        bench.send_raw(value, ided(), "o1")
    # Another test's topic has the name of the page's.
    text = PAGE.read_text().replace("order-events", bench.topic)
    # Spark looks for it where its JVM was started.
    text = text.replace('"windows.py"', repr(str(tmp_path / "windows.py")))
    blocks = [(text[: found.start()].count("\n") + 1, found[1]) for found in BLOCK.finditer(text)]
    assert len(blocks) == 6
    namespace = {"spark": bench.spark, "checkpoint": str(tmp_path / "checkpoint"), "__name__": __name__}
    namespace["database_url"] = bench.database.url
    try:
        for line, code in blocks:
            if code.startswith("# windows.py\n"):
                (tmp_path / "windows.py").write_text(code)
                continue
            exec(compile("\n" * line + code, PAGE, "exec", dont_inherit=True), namespace)
        stream = namespace["stream"]
        wait_until(lambda: stream.exception() is not None or in_windows(bench) > 3, 120, "windows in the sink")
        assert stream.exception() is None
    finally:
        for name in ("query", "stream"):
            if name in namespace:
                namespace[name].stop()
    assert capsys.readouterr().out == "2 0 0\n"
    assert bench.rows("SELECT * FROM order_status") == [("o1", "paid")]
    ((readings, total, batch),) = bench.rows(
        "SELECT sum(readings), sum(total), max(batch_id) FROM sensors, consumer.checkpoints WHERE grp = 'sensor-totals'"
    )
    assert batch >= 1
    assert total == readings * (readings - 1) // 2
