"""Spark's daemon of Python workers, with what our tasks import loaded before it forks them: for tests only.

A worker that has failed is not used again, and tests make tasks fail by the hundred: each would import pyarrow, pandas
and psycopg anew, a second of processor time. Spark's own daemon loads nothing, as there are modules that start threads
when they are imported, and threads do not come along into a fork. These start none, as they are told here.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path

# Such threads would be those of numpy's OpenBLAS, and the one that tidies up for Arrow's jemalloc.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

# Spark puts an archive of pyspark's sources, and a jar, before what is installed: each daemon would compile them, and
# Python 3.11 lists all of them again for each new worker, once for each of their folders.
sys.path[:] = [path for path in sys.path if not path.endswith((".zip", ".jar"))]
sys.path_importer_cache.clear()

for _name in (
    *("numpy", "pandas", "psycopg", "psycopg_binary", "pyarrow", "pyarrow.compute", "pyarrow.json", "orjson"),
    *("pyarrow.pandas_compat", "concurrent.futures.thread"),
    *("pyspark.worker", "pyspark.sql.types", "pyspark.sql.pandas.serializers", "pyspark.sql.pandas.types"),
    *("spark_jobs.task.partition", "spark_jobs.task.incoming", "spark_jobs.task.accumulators"),
    *("spark_jobs.payloads.json_text", "spark_jobs.payloads.json_whole", "spark_jobs.payloads.json_output"),
    *("spark_jobs.postgres.sink", "spark_jobs.dedup.processed", "spark_jobs.order_totals"),
    # A function of a test comes by its name: its worker imports the test's module, and that imports these.
    *("pytest", "bench"),
):
    importlib.import_module(_name)

# Each worker looks through its memory once before it begins, and need not look through this.
gc.collect()
gc.freeze()

# Only Linux tells.
if (_threads := Path("/proc/self/task")).exists():
    assert len(list(_threads.iterdir())) == 1, "a module has started a thread"

if __name__ == "__main__":
    from pyspark.daemon import manager

    manager()
