"""Plans of statements as the server executes them, and what tests assert of them."""

from __future__ import annotations

from typing import Any

from relay.settle.statements import KEEP_TO_THE_INDEX

# A connection keeps plans: after some executions the server may take one that fits any values.
PLANS = ["force_custom_plan", "force_generic_plan"]


def explain(connection: Any, query: Any, values: Any, *, plans: str = PLANS[0], to_the_index: bool) -> dict[str, Any]:
    connection.execute("BEGIN")
    connection.execute("SELECT set_config('plan_cache_mode', %s, true)", (plans,))
    if to_the_index:
        connection.execute(KEEP_TO_THE_INDEX, {"local": True})
    text = query.as_string(connection)
    plan = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {text}", values).fetchone()[0][0]
    connection.execute("ROLLBACK")
    return plan["Plan"]


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


def by_index_only(plan: dict[str, Any]) -> None:
    """No table is read from end to end, no backlog sorted or hashed."""
    found = nodes(plan)
    assert not [node for node in found if node["Node Type"] == "Seq Scan"], plan
    for node in found:
        if node["Node Type"] in {"Sort", "Incremental Sort", "Hash", "Materialize", "Bitmap Index Scan"}:
            # Of the lists that were bound, at most.
            assert node["Actual Rows"] * node["Actual Loops"] <= 2000, (node["Node Type"], plan)


def blocks(plan: dict[str, Any]) -> int:
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def forget_rows(admin: Any, table: str) -> None:
    """Give a table the statistics of a time when it was empty: between two bursts it has pages and no rows."""
    admin.execute(
        "UPDATE pg_class SET reltuples = 0, relpages = pg_relation_size(oid) / 8192 WHERE oid = ANY(ARRAY("
        "SELECT %(table)s::regclass::oid UNION SELECT indexrelid FROM pg_index WHERE indrelid = %(table)s::regclass))",
        {"table": table},
    )
