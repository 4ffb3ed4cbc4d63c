------------------------------- MODULE lanes -------------------------------
(* Of the relay's protocol (protocol.tla): what there is, writers, leases, and what a relay reads of a lane. *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
    Delivery,       \* "at-most-once", "at-least-once" or "exactly-once": OUTBOX_DELIVERY
    Relays, None,
    Keys,           \* event n has the n-th id that is drawn, and the key Keys[n]
    Lanes,          \* {1}, or {1, 2}: keys "a" and "c" are in lane 1, the others in lane 2
    BatchSize,      \* the most events of a lane that are in flight
    Producers,      \* exactly-once: transactional producers of a relay, which take turns
    Kinds,          \* the faults that may happen; "marks": low-water marks rise; "release": lanes are handed over;
                    \* "wal": the source is the WAL (one lane, nothing is refused)
    Faults,         \* how many of them
    Refusals,       \* how often Kafka refuses an event
    Wrong           \* "nothing", or the mistake that the relays make

AAA == <<"a", "a", "a">>
AAB == <<"a", "a", "b">>
AA == <<"a", "a">>
AB == <<"a", "b">>
BAB == <<"b", "a", "b">>

VARIABLES
    pg,             \* Postgres: the tables, and the writers
    relay,          \* of each relay: the worker's memory
    kafka,          \* topics, the state topic, the transaction coordinator, and what is on the network
    left,           \* how many faults and refusals may still happen
    repeats         \* at-least-once: how often an event may be repeated, as it was in flight when something failed

vars == <<pg, relay, kafka, left, repeats>>

Events == 1..Len(Keys)
Transactional == Delivery = "exactly-once"
Wal == "wal" \in Kinds
LaneOf(e) == IF Lanes = {1} \/ Keys[e] \in {"a", "c"} THEN 1 ELSE 2
NoId == <<>>
NoUndo == <<>>
Range(s) == {s[i] : i \in DOMAIN s}
Least(S) == CHOOSE x \in S : \A y \in S : x <= y
Lower(a, b) == IF a < b THEN a ELSE b
RECURSIVE Ascending(_)
Ascending(S) == IF S = {} THEN <<>> ELSE <<Least(S)>> \o Ascending(S \ {Least(S)})
First(S, n) == SubSeq(Ascending(S), 1, Lower(n, Cardinality(S)))
InFlight(h) == Range(h.pending) \cup (IF h.sent THEN Range(h.batch) ELSE {})

(* What a relay knows of a lane (core/lane.py; settle/settlement.py; polling/blocked_keys.py). stage: out ->      *)
(* acquired -> fenced -> read -> held. batch: read, and perhaps sent; pending: published, not settled; wire: sent *)
(* and not yet in the topic; expected: last_batch as this relay wrote it; mark and known: the low-water mark, and *)
(* the failures; at: up to which commit the stream was read, 0 when it begins again at the slot's position.       *)
NoMarker == [batch |-> 0, events |-> <<>>]
Out == [stage |-> "out", epoch |-> 0, former |-> NoId, fenced |-> 0, marker |-> NoMarker, expected |-> 0,
        batch |-> <<>>, pending |-> <<>>, sent |-> FALSE, wire |-> <<>>, mark |-> 0, known |-> {}, at |-> 0]

\* which: the producer of the next turn; refused: those that have to be replaced; confirmed: this turn may be committed.
Worker == [process |-> 1, phase |-> IF Transactional THEN "init" ELSE "idle", which |-> 0, refused |-> {},
           confirmed |-> FALSE, lanes |-> [l \in Lanes |-> Out]]

Init ==
    /\ pg = [drawn |-> 0, open |-> {}, history |-> {}, durable |-> {}, rows |-> {},
             failures |-> [e \in Events |-> "no"], discarded |-> {}, undo |-> NoUndo, wal |-> <<>>, slot |-> 0,
             lanes |-> [l \in Lanes |-> [epoch |-> 0, owner |-> None, leased |-> FALSE, batch |-> 0, names |-> NoId]]]
    /\ relay = [r \in Relays |-> Worker]
    /\ kafka = [topic |-> [l \in Lanes |-> <<>>],
                state |-> [l \in Lanes |-> <<[batch |-> 0, events |-> <<>>, id |-> NoId]>>],
                valid |-> {}, prepared |-> {}, delayed |-> {}, stray |-> {}]
    /\ left = [faults |-> Faults, refusals |-> Refusals]
    /\ repeats = [e \in Events |-> 0]

Fault(kind) == kind \in Kinds /\ left.faults > 0 /\ left' = [left EXCEPT !.faults = @ - 1]

-----------------------------------------------------------------------------
(* The statements' conditions *)

\* settle/statements.py, OURS: the lease is the one in the lane's row.
Ours(r, l) ==
    /\ relay[r].lanes[l].stage # "out"
    /\ relay[r].lanes[l].epoch = pg.lanes[l].epoch
    /\ pg.lanes[l].owner = r \/ Wrong = "owner_not_compared"

\* No take-over after ours has counted what we have in flight. (A failover may have lost ours.)
Is_newest(r, l) == relay[r].lanes[l].stage # "out" /\ relay[r].lanes[l].epoch >= pg.lanes[l].epoch

Repeated(r, l, events) ==
    [e \in Events |-> repeats[e] + (IF Delivery = "at-least-once" /\ e \in events /\ Is_newest(r, l) THEN 1 ELSE 0)]

\* The ids of a process are those of its base id: kafka/takeover.py, own_ids. The lane's row names the base.
Base(r) == <<r, relay[r].process>>
Ids(base) == [n \in 0..(Producers - 1) |-> <<base[1], base[2], n>>]
Id(r) == Ids(Base(r))[relay[r].which]

\* settle/statements.py, held: exactly-once also compares last_batch and the own id.
Expected(r, l) ==
    /\ Ours(r, l)
    /\ Transactional => /\ pg.lanes[l].batch = relay[r].lanes[l].expected
                        /\ pg.lanes[l].names = Base(r)

\* A synchronous commit: the flush barrier, and a later failover does not lose an earlier commit alone.
Flushed(tables) == [tables EXCEPT !.durable = @ \cup tables.history, !.undo = NoUndo]

\* The settling statement for one lane; the lease is renewed.
Settled(tables, l, events, batch) ==
    [tables EXCEPT !.rows = @ \ Range(events),
                   !.failures = [e \in Events |-> IF e \in Range(events) THEN "no" ELSE @[e]],
                   !.lanes[l].leased = TRUE,
                   !.lanes[l].batch = batch]

Next_batch(h) == IF Transactional /\ h.pending # <<>> THEN h.expected + 1 ELSE h.expected

\* polling/reader.py, note_settled: failures that we have published are gone, and the mark is lowered to them.
Without_pending(h) ==
    LET gone == h.known \cap Range(h.pending)
    IN [h EXCEPT !.pending = <<>>, !.known = @ \ gone, !.expected = Next_batch(h),
                 !.mark = IF gone = {} THEN @ ELSE Lower(@, Least(gone))]

-----------------------------------------------------------------------------
(* Writers and operators *)

\* A commit is in the WAL before others see it, and its locks go.
Unseen == Range(pg.wal) \ pg.history

\* outbox/writer.py, add: the INSERT draws an id. Writers of a key exclude each other.
Draw ==
    /\ pg.drawn < Len(Keys)
    /\ \A e \in pg.open \cup Unseen : Keys[e] # Keys[pg.drawn + 1]
    /\ pg' = [pg EXCEPT !.drawn = @ + 1, !.open = @ \cup {pg.drawn + 1}]
    /\ UNCHANGED <<relay, kafka, left, repeats>>

\* The service commits, perhaps long after later ids. With synchronous_commit = off the row is visible, not durable.
Commit(e) ==
    /\ e \in pg.open
    /\ pg' = IF Wal THEN [pg EXCEPT !.open = @ \ {e}, !.wal = Append(@, e)] ELSE
           [pg EXCEPT !.open = @ \ {e}, !.history = @ \cup {e}, !.rows = @ \cup {e}, !.undo = NoUndo,
                        !.durable = IF "postgres" \in Kinds THEN @ ELSE @ \cup {e}]
    /\ UNCHANGED <<relay, kafka, left, repeats>>

Appear(e) ==
    /\ e \in Unseen
    /\ pg' = [pg EXCEPT !.history = @ \cup {e}, !.rows = @ \cup {e}, !.durable = @ \cup {e}]
    /\ UNCHANGED <<relay, kafka, left, repeats>>

\* operations/dead_letters.py: `dead-letters discard` and `dead-letters retry`.
Operator(e) ==
    /\ pg.failures[e] = "dead"
    /\ \/ pg' = [pg EXCEPT !.failures[e] = "no", !.discarded = @ \cup {e}, !.undo = NoUndo]
       \/ pg' = [pg EXCEPT !.failures[e] = "due", !.rows = @ \cup {e}, !.undo = NoUndo]
    /\ UNCHANGED <<relay, kafka, left, repeats>>

-----------------------------------------------------------------------------
(* Leases *)

\* The lease runs out by the database's clock, or the holder's session ends (lanes.py, _FREE). Its holder need not
\* notice. It is a fault unless the holder is gone.
Expire(l) ==
    /\ pg.lanes[l].leased
    /\ pg' = [pg EXCEPT !.lanes[l].leased = FALSE]
    /\ IF \E r \in Relays : Ours(r, l) THEN Fault("expire") ELSE UNCHANGED left
    /\ UNCHANGED <<relay, kafka, repeats>>

Quiet(r) == relay[r].phase = "idle" /\ \A l \in Lanes : relay[r].lanes[l].batch = <<>>

Failing(l) == {e \in Events : LaneOf(e) = l /\ pg.failures[e] # "no"}

\* lanes.py, LaneTable.acquire, and the loop's _take_and_let_go: events that are published are still to be settled.
Acquire(r, l) ==
    LET row == pg.lanes[l]
        h == relay[r].lanes[l]
    IN /\ ~row.leased
       /\ h.stage = "out" \/ Quiet(r)
       /\ pg' = [pg EXCEPT !.lanes[l] = [row EXCEPT !.epoch = @ + 1, !.owner = r, !.leased = TRUE],
                           !.undo = IF "failover" \in Kinds THEN <<l, row>> ELSE NoUndo]
       /\ relay' = [relay EXCEPT ![r].lanes[l] =
            [Out EXCEPT !.epoch = row.epoch + 1, !.former = row.names,
                        !.stage = IF ~Transactional THEN "held" ELSE IF row.names \in {NoId, Base(r)} THEN "fenced"
                                  ELSE "acquired",
                        !.pending = IF Transactional THEN <<>> ELSE h.pending,
                        !.known = IF Transactional THEN {} ELSE Failing(l)]]
       /\ repeats' = [e \in Events |-> repeats[e] +
            Cardinality({q \in Relays \ {r} : Is_newest(q, l) /\ e \in InFlight(relay[q].lanes[l])})]
       /\ UNCHANGED <<kafka, left>>

\* lanes.py, release: between turns, all settled. The next holder need not fence us.
Release(r, l) ==
    /\ Fault("release")
    /\ Quiet(r)
    /\ relay[r].lanes[l].stage = "held" /\ relay[r].lanes[l].pending = <<>>
    /\ pg' = IF Ours(r, l) THEN Flushed([pg EXCEPT !.lanes[l].owner = None, !.lanes[l].leased = FALSE,
                                                   !.lanes[l].names = NoId])
             ELSE pg
    /\ relay' = [relay EXCEPT ![r].lanes[l] = Out]
    /\ UNCHANGED <<kafka, repeats>>

\* An asynchronous failover loses the commit of a take-over; the lease runs out meanwhile.
Failover ==
    /\ pg.undo # NoUndo
    /\ Fault("failover")
    /\ pg' = [pg EXCEPT !.lanes[pg.undo[1]] = [pg.undo[2] EXCEPT !.leased = FALSE], !.undo = NoUndo]
    /\ UNCHANGED <<relay, kafka, repeats>>

-----------------------------------------------------------------------------
(* Reading a lane *)

Waits(failing, e) == \E f \in failing : f < e /\ Keys[f] = Keys[e]

\* polling/reader.py, _lower: the mark goes down to a failure that is gone before newer rows of its key are read.
Looked(h, l) ==
    LET gone == h.known \ Failing(l)
    IN [h EXCEPT !.known = Failing(l), !.mark = IF gone = {} THEN @ ELSE Lower(@, Least(gone))]

\* polling/reader.py, look_first and the look of each second.
Look(r, l) ==
    LET h == relay[r].lanes[l]
    IN /\ h.stage = "held" /\ h.known # Failing(l)
       /\ relay' = [relay EXCEPT ![r].lanes[l] = Looked(h, l)]
       /\ UNCHANGED <<pg, kafka, left, repeats>>

May_read(r, l) ==
    LET h == relay[r].lanes[l]
    IN /\ relay[r].phase = "idle" /\ ~relay[r].confirmed /\ relay[r].which \notin relay[r].refused
       /\ h.stage = "held" /\ h.batch = <<>> /\ h.wire = <<>>

\* polling/reader.py, read and _freed: the lowest rows above the mark whose key does not wait, or one that is due. A row
\* that should wait for a failure, as far as is known, is taken back: the failure is gone.
Read(r, l, most) ==
    LET h == relay[r].lanes[l]
        mine == {e \in pg.rows : LaneOf(e) = l} \ Range(h.pending)
        due == {e \in mine : pg.failures[e] = "due" /\ ~Waits(Failing(l), e)}
        others == {e \in mine : /\ e > h.mark
                                /\ h.known # {} => e \notin Failing(l) /\ ~Waits(Failing(l), e)}
    IN /\ ~Wal /\ May_read(r, l)
       /\ \E found \in {<<e>> : e \in due} \cup (IF others = {} THEN {} ELSE {First(others, most)}) :
            relay' = [relay EXCEPT ![r].lanes[l] =
                IF Wrong # "freed_key_overtakes" /\ \E e \in Range(found) : Waits(h.known, e)
                THEN Looked(h, l)
                ELSE [h EXCEPT !.batch = found]]
       /\ UNCHANGED <<pg, kafka, left, repeats>>

\* wal/from_stream.py, _filled: the next commits, up to one that is not visible yet. One without its row is done.
Read_stream(r, l) ==
    LET h == relay[r].lanes[l]
        from == IF h.at > pg.slot THEN h.at ELSE pg.slot
        ends == {n \in (from + 1)..Lower(from + BatchSize, Len(pg.wal)) :
                    Wrong = "skips_unseen" \/ \A i \in (from + 1)..n : pg.wal[i] \notin Unseen}
        end == CHOOSE n \in ends : \A m \in ends : m <= n
    IN /\ Wal /\ May_read(r, l) /\ ends # {}
       /\ relay' = [relay EXCEPT ![r].lanes[l] =
            [h EXCEPT !.at = end,
                      !.batch = SelectSeq(SubSeq(pg.wal, from + 1, end), LAMBDA e : e \in pg.rows \ Range(h.pending))]]
       /\ UNCHANGED <<pg, kafka, left, repeats>>

\* wal/session.py, _report: the slot is advanced up to where all is settled. An old reader may still do it.
Feedback(r, l) ==
    LET h == relay[r].lanes[l]
        open == IF Wrong = "confirms_unsettled" THEN {} ELSE Range(h.batch) \cup Range(h.pending)
        ends == {n \in (pg.slot + 1)..h.at : \A i \in (pg.slot + 1)..n : pg.wal[i] \notin open}
    IN /\ ends # {}
       /\ pg' = [pg EXCEPT !.slot = CHOOSE n \in ends : \A m \in ends : m <= n]
       /\ UNCHANGED <<relay, kafka, left, repeats>>

\* polling/low_water_mark.py: no open transaction has a lower id, and nothing up to there can be published.
RaiseMark(r, l) ==
    LET h == relay[r].lanes[l]
        readable == {e \in pg.rows : LaneOf(e) = l /\ e > h.mark /\ e \notin h.known /\ ~Waits(h.known, e)}
        past == {m \in (h.mark + 1)..pg.drawn : /\ \A e \in pg.open : e > m \/ Wrong = "mark_past_a_transaction"
                                                /\ \A e \in readable : e > m}
    IN /\ "marks" \in Kinds
       /\ relay[r].phase = "idle"
       /\ h.stage = "held" /\ h.batch = <<>> /\ h.pending = <<>> /\ h.known = Failing(l)
       /\ past # {}
       /\ relay' = [relay EXCEPT ![r].lanes[l].mark = CHOOSE m \in past : \A n \in past : n <= m]
       /\ UNCHANGED <<pg, kafka, left, repeats>>
=============================================================================
