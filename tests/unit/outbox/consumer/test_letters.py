"""Which messages wait behind a dead letter of their key."""

from __future__ import annotations

import pyarrow as pa

from spark_jobs.task.behind import behind


def test_what_comes_after_a_dead_letter_of_its_key_is_behind_it():
    rows = [("t", 0, 1, b"a"), ("t", 0, 2, b"a"), ("t", 0, 3, b"b"), ("t", 1, 1, b"a"), ("u", 0, 9, b"a")]
    rows += [("t", 0, 4, None), ("u", 0, 1, b""), ("t", 0, 5, b"old"), ("t", 0, 6, b"a")]
    topics, parts, offsets, keys = zip(*rows, strict=True)
    columns = [topics, pa.array(parts, pa.int32()), offsets, pa.array(keys, pa.binary())]
    batch = pa.RecordBatch.from_arrays(list(map(pa.array, columns)), ["topic", "partition", "offset", "key"])
    dead = {("t", b"a"): ("t", 0, 1), ("t", b"old"): None, ("u", b""): ("u", 0, 1), ("x", b"b"): None}
    dead |= {("t", f"key{number}".encode()): None for number in range(10_000)}
    (found,) = behind(dead, [batch])
    assert list(map(tuple, (row.values() for row in found.to_pylist()))) == [
        ("t", 0, 2),
        ("t", 1, 1),
        ("t", 0, 5),
        ("t", 0, 6),
    ]
    assert [one.num_rows for one in behind({}, [batch, batch.slice(0, 0)])] == [0, 0]
