"""The Python workers that run the consumer's tasks, and nothing else."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pyarrow as pa
import pytest
from class_archives import ARCHIVES

from spark_jobs.spark import rows

pytestmark = pytest.mark.spark


@pytest.mark.skipif(not ARCHIVES["spark"].exists(), reason="`make test` makes it")
def test_the_jvm_uses_the_archive_of_classes(spark):
    """It passes by one that is not for it, and says nothing: each start would take twice as long."""
    assert str(ARCHIVES["spark"]) in Path(f"/proc/{spark.sparkContext._gateway.proc.pid}/maps").read_text()


@pytest.mark.parametrize("pool", ["read", "apply"])
def test_what_is_loaded_is_kept_out_of_garbage_collections(spark, pool):
    """Spark collects after each task: that would look through every module, and cost more than a small task itself."""

    def look(batches):
        for batch in batches:
            yield pa.RecordBatch.from_pydict(
                {"pid": [os.getpid()], "frozen": [gc.get_freeze_count()], "tracked": [len(gc.get_objects())]}
            )
            assert batch.num_rows

    made = rows.in_tasks(spark.range(2).coalesce(1), look, "pid long, frozen long, tracked long", pool=pool)
    for _ in range(3):
        (found,) = made.collect()
        assert found.pid != os.getpid()
        assert found.frozen > 50_000
        # What a task itself makes is collected as ever.
        assert found.tracked < found.frozen
