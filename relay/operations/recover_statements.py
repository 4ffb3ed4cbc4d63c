"""The statements of recover.py: records in a temporary table, compared with the outbox's rows."""

from __future__ import annotations

from typing import Final

TABLE: Final = (
    "DROP TABLE IF EXISTS pg_temp.outbox_recover",
    """CREATE TEMPORARY TABLE outbox_recover (
           event_id uuid NOT NULL, mark text NOT NULL, copy boolean NOT NULL, ours boolean NOT NULL, content bytea,
           topic text NOT NULL, partition integer NOT NULL, "offset" bigint NOT NULL, at timestamptz NOT NULL,
           written timestamptz NOT NULL, key text NOT NULL)""",
)
COPY: Final = """
COPY pg_temp.outbox_recover (event_id, mark, copy, ours, content, topic, partition, "offset", at, written, key)
FROM STDIN"""
# A record of another program may have a longer key than an index can hold.
INDEX: Final = (
    "CREATE INDEX ON pg_temp.outbox_recover (event_id)",
    "CREATE INDEX ON pg_temp.outbox_recover (topic, hashtextextended(key, 0), at)",
    "ANALYZE pg_temp.outbox_recover",
)

# The topics too: since then a route may have changed.
ARCHIVED: Final = """
SELECT min({created_at}), array_agg(DISTINCT topic) FILTER (WHERE topic IS NOT NULL)
  FROM {published} WHERE published_at >= %(since)s AND published_at < %(until)s"""

ARCHIVE_FROM: Final = "SELECT min(published_at) FROM {published}"

RELAYS: Final = "SELECT count(*) FROM {relays} WHERE {alive}"

# A relay that takes, renews or releases a lane changes its row.
LANES: Final = "SELECT l::text FROM {lanes} AS l ORDER BY lane"
LOCK_LANES: Final = """
SELECT l::text, lane, owner, lease_until::text, lease_until >= clock_timestamp() FROM {lanes} AS l
 ORDER BY lane FOR UPDATE"""

# What reconcile and this have settled without an archive is in the audit only.
LOST: Final = """
SELECT DISTINCT ON (s.event_id) s.event_id::text, s.key, s.topic, s.partition, s."offset", s.at,
       s.written >= %(since)s OR s.at >= %(later)s OR %(archived)s,
       %(known)s::timestamptz IS NULL OR s.at >= %(known)s
  FROM pg_temp.outbox_recover AS s
 WHERE s.ours AND s.mark = '' AND s.at >= %(from)s AND s.at < %(until)s
   AND NOT EXISTS (SELECT FROM {events} AS e WHERE e.event_id = s.event_id)
   AND NOT EXISTS (SELECT FROM {dead_letters} AS d WHERE d.event_id = s.event_id)
   AND NOT EXISTS (SELECT FROM {scheduled} AS w WHERE w.event_id = s.event_id)
   AND NOT EXISTS (SELECT FROM {published} AS p WHERE p.event_id = s.event_id)
   AND s.event_id::text NOT IN (
       SELECT jsonb_array_elements_text(
                  coalesce(details -> 'event_ids_on_kafka', '[]') || coalesce(details -> 'superseded', '[]'))
         FROM {audit}
        WHERE what IN ('reconcile settles', 'recover settles'))
 ORDER BY s.event_id, s.at"""

# Of any source: the setting may have changed. A replay counts as its event, a copy for a dead-letter topic does not.
# Kafka keeps the last record of a key, of whatever aggregate type: compaction deletes what others follow.
MISSING: Final = """
WITH missing AS MATERIALIZED (
    SELECT DISTINCT ON (p.event_id, p.copy) p.event_id, p.copy, p.aggregate_type, p.aggregate_id, p.topic, p.partition,
           p."offset", p.published_at, p.id, num_nonnulls(p.payload, p.payload_bytes) = 0 AS tombstone
      FROM (SELECT *, coalesce(headers ? %(dead)s, false) AS copy FROM {published}
             WHERE published_at >= %(since)s AND published_at < %(until)s) AS p
     WHERE NOT EXISTS (SELECT FROM pg_temp.outbox_recover AS s WHERE s.event_id = p.event_id AND s.copy = p.copy)
       AND NOT EXISTS (SELECT FROM {events} AS e
                        WHERE e.event_id = p.event_id AND coalesce(e.headers ? %(dead)s, false) = p.copy)
     ORDER BY p.event_id, p.copy, p.published_at),
held AS (
    SELECT id, event_id, aggregate_type, aggregate_id, headers FROM {published}
     UNION ALL
    SELECT id, event_id, aggregate_type, aggregate_id, headers FROM {events}
     UNION ALL
    SELECT id, event_id, aggregate_type, aggregate_id, headers FROM {dead_letters}),
there AS (
    SELECT aggregate_type, aggregate_id, k.copy, min(h.id) AS first_id
      FROM (SELECT DISTINCT aggregate_type, aggregate_id, copy FROM missing) AS k
      JOIN held AS h USING (aggregate_type, aggregate_id)
     WHERE coalesce(h.headers ? %(dead)s, false) = k.copy
       AND EXISTS (SELECT FROM pg_temp.outbox_recover AS s WHERE s.event_id = h.event_id AND s.copy = k.copy)
     GROUP BY aggregate_type, aggregate_id, k.copy, h.event_id
     UNION ALL
    SELECT w.aggregate_type, w.aggregate_id, false, 9223372036854775807
      FROM {scheduled} AS w JOIN pg_temp.outbox_recover AS s USING (event_id) WHERE NOT s.copy),
last AS (
    SELECT aggregate_type, aggregate_id, copy, max(first_id) AS id FROM there
     GROUP BY aggregate_type, aggregate_id, copy)
SELECT m.event_id::text, m.aggregate_id, coalesce(m.topic, ''), coalesce(m.partition, -1), coalesce(m."offset", -1),
       m.published_at, m.copy,
       last.id IS NOT NULL AND last.id > (
           SELECT min(p.id) FROM {published} AS p
            WHERE p.event_id = m.event_id AND coalesce(p.headers ? %(dead)s, false) = m.copy),
       m.aggregate_type,
       m.id < max(m.id) OVER (PARTITION BY m.aggregate_type, m.aggregate_id, m.copy)
       OR EXISTS (SELECT FROM pg_temp.outbox_recover AS s
                   WHERE s.topic = m.topic AND hashtextextended(s.key, 0) = hashtextextended(m.aggregate_id, 0)
                     AND s.key = m.aggregate_id AND s.at > m.published_at),
       m.tombstone
  FROM missing AS m LEFT JOIN last USING (aggregate_type, aggregate_id, copy)
 ORDER BY m.event_id, m.copy"""

THERE: Final = """
EXISTS (SELECT FROM pg_temp.outbox_recover AS s
         WHERE s.ours AND s.event_id = r.event_id AND s.mark = r.mark AND s.content IS NOT DISTINCT FROM r.content)"""

MARK_FOUND: Final = "UPDATE pg_temp.outbox_reconcile AS r SET found = true WHERE NOT found AND {there}"

CHANGED: Final = """
SELECT r.event_id::text FROM pg_temp.outbox_reconcile AS r
 WHERE NOT r.found
   AND EXISTS (SELECT FROM pg_temp.outbox_recover AS s
                WHERE s.ours AND s.event_id = r.event_id AND s.mark = r.mark)
 ORDER BY r.id"""

STANDING_TYPES: Final = """
SELECT aggregate_type FROM {scheduled} UNION SELECT aggregate_type FROM {dead_letters}"""

# Of a compacted topic, one that a later record of its key follows was published too: it was due before, or it had to be
# retried (or discarded) before its key could go on.
STANDING: Final = """
SELECT * FROM (
SELECT r.lane, r.id, r.event_id::text, NOT {there} AS superseded,
       {there} OR r.until IS NOT NULL AND r.mark = '' AND EXISTS (
           SELECT FROM unnest(%(types)s::text[], %(topics)s::text[]) AS c(aggregate_type, topic)
             JOIN pg_temp.outbox_recover AS s USING (topic)
            WHERE c.aggregate_type = r.aggregate_type
              AND hashtextextended(s.key, 0) = hashtextextended(r.aggregate_id, 0)
              AND s.key = r.aggregate_id AND s.ours AND NOT s.copy
              AND s.at > r.until + interval '1 minute') AS found
  FROM (SELECT {lane} AS lane, id, event_id, aggregate_type, aggregate_id, {until} AS until,
               coalesce(nullif(headers ->> %(replay)s, ''), headers ->> %(dead)s, '') AS mark,
               sha256(coalesce(payload_bytes, convert_to(payload::text, 'UTF8'))) AS content
          FROM {table} AS t) AS r) AS r
 WHERE found ORDER BY event_id, id"""
BLOCKS_SINCE: Final = """
(SELECT t.dead_at FROM {failures} AS f WHERE f.lane = t.lane AND f.id = t.id AND f.blocks)"""

# No mark holds any more, and no epoch: a relay that wakes up has a mark too. Rows that are put back are in the stream
# behind those that wait.
READ_ALL: Final = "UPDATE {lanes} SET {released}, low_water_mark = NULL, mark_failures = NULL, streaming = false"

# Of an event that was replayed, the first row. A later event of the key that is due is read before what waits: these
# must be due too.
RESEND: Final = """
WITH lost AS (
    SELECT DISTINCT ON (m.event_id, m.copy) p.tableoid AS part, p.ctid AS place
      FROM unnest(%(event_ids)s::uuid[], %(copies)s::boolean[]) AS m(event_id, copy)
      JOIN {published} AS p ON p.event_id = m.event_id AND coalesce(p.headers ? %(dead)s, false) = m.copy
     ORDER BY m.event_id, m.copy, p.id),
gone AS (
    DELETE FROM {published} AS p USING lost WHERE p.tableoid = lost.part AND p.ctid = lost.place RETURNING p.*),
back AS (
    INSERT INTO {events} (id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers,
                          created_at, from_relay) OVERRIDING SYSTEM VALUE
    SELECT id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers, created_at, true
      FROM gone RETURNING lane, id, event_id, aggregate_type, aggregate_id, headers),
due AS (
    INSERT INTO {failures} (lane, id, event_id, aggregate_type, aggregate_id, blocks, attempts, last_error,
                            first_failed_at, last_failed_at, next_attempt_at)
    SELECT lane, id, event_id, aggregate_type, aggregate_id, true, 0, 'Kafka has lost it', now(), now(), now()
      FROM back AS b
     WHERE NOT coalesce(headers ? %(dead)s, false)
       AND EXISTS (SELECT FROM {failures} AS f
                    WHERE f.lane = b.lane AND f.aggregate_type = b.aggregate_type
                      AND f.aggregate_id = b.aggregate_id AND f.id > b.id AND f.blocks))
SELECT count(*) FROM back"""

UNSCHEDULE: Final = "DELETE FROM {scheduled} WHERE id = ANY(%(ids)s::bigint[])"
