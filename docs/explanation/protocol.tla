------------------------------ MODULE protocol ------------------------------
(* The relay's protocol: which relay may publish and settle a lane, and what readers of Kafka see. Polling, and WAL. *)
(* protocol.md says what is checked and what is not. Names are the code's; each action names the code that it      *)
(* abstracts. A relay that sleeps is one whose next step comes late: no action stands for it.                      *)
EXTENDS lanes

-----------------------------------------------------------------------------
(* Publishing, at-least-once and at-most-once: kafka/idempotent.py *)

\* polling/source.py, Settling.MEANWHILE: the leases are checked and all that was read is flushed, then the batch is
\* sent. Settling.FIRST is Settle, and then this. At-most-once deletes the rows with it (polling/at_most_once.py).
Send(r, l) ==
    LET h == relay[r].lanes[l]
        gone == IF Delivery = "at-most-once" THEN Range(h.batch) ELSE {}
    IN /\ ~Transactional
       /\ h.stage = "held" /\ h.batch # <<>> /\ ~h.sent
       /\ Len(h.batch) + Len(h.pending) <= BatchSize
       /\ IF Ours(r, l)
          THEN /\ pg' = IF Wrong = "no_flush_barrier" THEN pg ELSE Flushed([pg EXCEPT !.rows = @ \ gone])
               /\ relay' = [relay EXCEPT ![r].lanes[l].sent = TRUE, ![r].lanes[l].wire = h.batch]
          ELSE relay' = [relay EXCEPT ![r].lanes[l] = Out] /\ UNCHANGED pg
       /\ repeats' = IF Ours(r, l) THEN repeats ELSE Repeated(r, l, InFlight(h))
       /\ UNCHANGED <<kafka, left>>

\* kafka/idempotent.py, _in_time: what is sent is in the topic, or dropped, before the lease ends.
In_time(r, l) == Ours(r, l) /\ pg.lanes[l].leased

Appended(l, e) == [kafka EXCEPT !.topic[l] = Append(@, [event |-> e, id |-> NoId])]

\* The broker writes the next event of the batch: in order, none left out.
Arrive(r, l) ==
    LET h == relay[r].lanes[l]
    IN /\ h.wire # <<>>
       /\ Delivery = "at-most-once" => In_time(r, l) \/ Wrong = "sends_after_its_lease"
       /\ kafka' = Appended(l, Head(h.wire))
       /\ relay' = [relay EXCEPT ![r].lanes[l].wire = Tail(@)]
       /\ UNCHANGED <<pg, left, repeats>>

\* What an earlier producer of a relay had sent comes late. So it does of a process that was killed.
Arrive_late(s) ==
    /\ s \in kafka.stray
    /\ kafka' = [Appended(s[1], Head(s[2])) EXCEPT
                 !.stray = (@ \ {s}) \cup (IF Tail(s[2]) = <<>> THEN {} ELSE {<<s[1], Tail(s[2])>>})]
    /\ UNCHANGED <<pg, relay, left, repeats>>

\* kafka/producer.py, drain: all is acknowledged.
Acknowledge(r, l) ==
    LET h == relay[r].lanes[l]
    IN /\ h.sent /\ (h.wire = <<>> \/ Wrong = "settles_unconfirmed")
       /\ relay' = [relay EXCEPT ![r].lanes[l] =
            [h EXCEPT !.sent = FALSE, !.batch = <<>>,
                      !.pending = IF Delivery = "at-most-once" THEN <<>> ELSE @ \o h.batch]]
       /\ UNCHANGED <<pg, kafka, left, repeats>>

\* At-most-once: what is not sent in time is lost, and counted.
Give_up(r, l) ==
    /\ Delivery = "at-most-once" /\ relay[r].lanes[l].wire # <<>> /\ ~In_time(r, l)
    /\ relay' = [relay EXCEPT ![r].lanes[l] = Out]
    /\ UNCHANGED <<pg, kafka, left, repeats>>

\* settle/settlement.py: rows are deleted under the lease; another relay's lane is dropped.
Settle(r, l) ==
    LET h == relay[r].lanes[l]
    IN /\ ~Transactional /\ h.stage = "held" /\ h.pending # <<>>
       /\ IF Ours(r, l)
          THEN /\ pg' = Flushed(Settled(pg, l, h.pending, 0))
               /\ relay' = [relay EXCEPT ![r].lanes[l] = Without_pending(h)]
          ELSE /\ relay' = [relay EXCEPT ![r].lanes[l] =
                    IF h.sent THEN [h EXCEPT !.pending = <<>>] ELSE Out]
               /\ UNCHANGED pg
       /\ repeats' = IF Ours(r, l) THEN repeats ELSE Repeated(r, l, Range(h.pending))
       /\ UNCHANGED <<kafka, left>>

\* What a producer had on the network may still come, or never.
Strays(l, wire) == {kafka.stray} \cup (IF wire = <<>> \/ Delivery = "at-most-once" THEN {}
                                       ELSE {kafka.stray \cup {<<l, wire>>}})

\* Kafka fails (core/loop.py, _conclude): what is acknowledged is settled, the rest is read again, by a new producer.
Kafka_fails(r, l) ==
    LET h == relay[r].lanes[l]
        arrived == Len(h.batch) - Len(h.wire)
    IN /\ h.sent
       /\ Fault("kafka")
       /\ \E n \in {0, arrived}, stray \in Strays(l, h.wire) :
            LET acknowledged == IF Delivery = "at-most-once" THEN <<>> ELSE SubSeq(h.batch, 1, n)
            IN /\ relay' = [relay EXCEPT ![r].lanes[l] =
                    [h EXCEPT !.sent = FALSE, !.batch = <<>>, !.wire = <<>>, !.at = 0, !.pending = @ \o acknowledged]]
               /\ kafka' = [kafka EXCEPT !.stray = stray]
               /\ repeats' = Repeated(r, l, Range(h.batch) \ Range(acknowledged))
       /\ UNCHANGED pg

-----------------------------------------------------------------------------
(* Publishing, exactly-once: kafka/transactional.py; kafka/takeover.py; kafka/fencing.py *)

\* A transaction ends in a log: its records are decided, or gone. The state topic is compacted.
Ended(log, id, committed) ==
    IF committed THEN [i \in DOMAIN log |-> IF log[i].id = id THEN [log[i] EXCEPT !.id = NoId] ELSE log[i]]
    ELSE SelectSeq(log, LAMBDA entry : entry.id # id)
RECURSIVE Compacted(_)
Compacted(log) ==
    IF Len(log) > 1 /\ log[1].id = NoId /\ log[2].id = NoId THEN Compacted(Tail(log)) ELSE log

\* What is prepared will be committed: control records are written. What is open is aborted.
End(id) ==
    LET committed == id \in kafka.prepared
    IN [kafka EXCEPT !.topic = [l \in Lanes |-> Ended(@[l], id, committed)],
                     !.state = [l \in Lanes |-> Compacted(Ended(@[l], id, committed))],
                     !.prepared = @ \ {id}]
Fenced(id) == [End(id) EXCEPT !.valid = @ \ {id}, !.delayed = @ \ {id}]
Is_open(id) == \E l \in Lanes : \E entry \in Range(kafka.state[l]) : entry.id = id

\* core/loop.py, _close: everything is made anew; markers and Postgres know what is published.
Again(worker) ==
    [worker EXCEPT !.phase = "init", !.which = 0, !.refused = {}, !.confirmed = FALSE,
        !.lanes = [l \in Lanes |-> IF @[l].stage \in {"out", "acquired"} THEN @[l]
                                   ELSE [Out EXCEPT !.stage = "fenced", !.epoch = @ + worker.lanes[l].epoch]]]

\* kafka/transactional.py, _init: init_transactions on each of the own ids, before the leases are read.
Init_id(r) ==
    /\ relay[r].phase = "init"
    /\ kafka' = [Fenced(Id(r)) EXCEPT !.valid = @ \cup {Id(r)}]
    /\ relay' = [relay EXCEPT ![r].which = (@ + 1) % Producers,
                              ![r].phase = IF relay[r].which + 1 = Producers THEN "idle" ELSE "init"]
    /\ UNCHANGED <<pg, left, repeats>>

\* kafka/transactional.py, serve: the producer of a refused message is replaced before a later turn is read. This may
\* undo the fence of a relay that has taken a lane; the lease is checked after it.
Replace_id(r) ==
    /\ Quiet(r) /\ relay[r].which \in relay[r].refused
    /\ kafka' = [Fenced(Id(r)) EXCEPT !.valid = @ \cup {Id(r)}]
    /\ relay' = [relay EXCEPT ![r].refused = @ \ {relay[r].which}]
    /\ UNCHANGED <<pg, left, repeats>>

\* kafka/takeover.py, _fence_former: each id that the lane's row named when we acquired it.
Fence(r, l) ==
    LET h == relay[r].lanes[l]
    IN /\ Quiet(r) /\ h.stage = "acquired"
       /\ kafka' = Fenced(Ids(h.former)[h.fenced])
       /\ relay' = [relay EXCEPT ![r].lanes[l] =
            [h EXCEPT !.fenced = @ + 1, !.stage = IF h.fenced + 1 = Producers THEN "fenced" ELSE @]]
       /\ UNCHANGED <<pg, left, repeats>>

\* kafka/state_topic.py, read: the last marker, as soon as all up to the high watermark is decided.
Read_marker(r, l) ==
    LET h == relay[r].lanes[l]
        log == kafka.state[l]
        decided == SelectSeq(log, LAMBDA entry : entry.id = NoId)
        last == decided[Len(decided)]
    IN /\ Quiet(r) /\ h.stage = "fenced"
       /\ Len(decided) = Len(log) \/ Wrong = "reads_undecided"
       /\ relay' = [relay EXCEPT ![r].lanes[l] =
            [h EXCEPT !.stage = "read", !.marker = [batch |-> last.batch, events |-> last.events]]]
       /\ UNCHANGED <<pg, kafka, left, repeats>>

\* polling/takeover.py, adopt: settle what the marker names, and write the own id. core/marker.py compares the batches.
Adopt(r, l) ==
    LET h == relay[r].lanes[l]
        row == pg.lanes[l]
        blind == Wrong = "publishes_blind"
        batch == IF blind THEN row.batch ELSE h.marker.batch
        events == IF blind \/ batch = row.batch THEN <<>> ELSE h.marker.events
        lost == ~blind /\ ~(batch \in {row.batch, row.batch + 1})
        after == Flushed([Settled(pg, l, events, batch) EXCEPT !.lanes[l].names = Base(r)])
        failing == {e \in Events : LaneOf(e) = l /\ after.failures[e] # "no"}
    IN /\ Quiet(r)
       /\ h.stage = "read" \/ (blind /\ h.stage = "fenced")
       /\ IF ~Ours(r, l) THEN relay' = [relay EXCEPT ![r].lanes[l] = Out] /\ UNCHANGED pg
          ELSE IF lost THEN relay' = [relay EXCEPT ![r].lanes[l].stage = "stopped"] /\ UNCHANGED pg
          ELSE /\ pg' = after
               /\ relay' = [relay EXCEPT ![r].lanes[l] =
                    [Out EXCEPT !.stage = "held", !.epoch = h.epoch, !.expected = batch, !.known = failing]]
       /\ UNCHANGED <<kafka, left, repeats>>

Turn(r) == {l \in Lanes : relay[r].lanes[l].batch # <<>>}

\* kafka/transactional.py, _in_transaction: events, and a marker for each lane, before the turn is confirmed or after.
Produce(r) ==
    LET marker(l) == [batch |-> Next_batch(relay[r].lanes[l]) + 1, events |-> relay[r].lanes[l].batch, id |-> Id(r)]
        entries(l) == [i \in DOMAIN relay[r].lanes[l].batch |-> [event |-> relay[r].lanes[l].batch[i], id |-> Id(r)]]
    IN /\ Transactional /\ relay[r].phase = "idle" /\ Turn(r) # {}
       /\ Id(r) \notin kafka.prepared
       /\ IF Id(r) \in kafka.valid
          THEN /\ kafka' = [kafka EXCEPT
                    !.topic = [l \in Lanes |-> @[l] \o entries(l)],
                    !.state = [l \in Lanes |-> IF l \in Turn(r) THEN Append(@[l], marker(l)) ELSE @[l]]]
               /\ relay' = [relay EXCEPT ![r].phase = "sent"]
          ELSE relay' = [relay EXCEPT ![r] = Again(@)] /\ UNCHANGED kafka
       /\ UNCHANGED <<pg, left, repeats>>

\* polling/source.py, confirm, with Settling.FIRST or BEFORE_COMMIT: one statement settles the turn before, in all
\* lanes, and checks this turn's. If one of them is lost, the transaction is aborted. The answer may be lost.
Confirm(r) ==
    LET h(l) == relay[r].lanes[l]
        asked == {l \in Lanes : h(l).stage = "held" /\ (h(l).batch # <<>> \/ h(l).pending # <<>>)}
        fine == {l \in asked : Expected(r, l)}
        aborts == relay[r].phase = "sent" /\ \E l \in asked \ fine : h(l).batch # <<>>
        settled == UNION {Range(h(l).pending) : l \in fine}
        known(l) == IF l \in fine THEN Without_pending(h(l))
                    ELSE IF l \in asked THEN (IF Ours(r, l) THEN [Out EXCEPT !.stage = "fenced", !.epoch = h(l).epoch]
                                              ELSE Out)
                    ELSE h(l)
        after == [relay[r] EXCEPT !.lanes = [l \in Lanes |-> known(l)],
                                  !.confirmed = \E l \in fine : h(l).batch # <<>>]
    IN /\ Transactional /\ relay[r].phase \in {"idle", "sent"} /\ ~relay[r].confirmed /\ asked # {}
       /\ pg' = Flushed([pg EXCEPT
            !.rows = @ \ settled,
            !.failures = [e \in Events |-> IF e \in settled THEN "no" ELSE @[e]],
            !.lanes = [l \in Lanes |-> IF l \in fine THEN [@[l] EXCEPT !.leased = TRUE, !.batch = Next_batch(h(l))]
                                       ELSE @[l]]])
       /\ \/ relay' = [relay EXCEPT ![r] = IF aborts THEN Again(after) ELSE after] /\ UNCHANGED left
          \/ relay' = [relay EXCEPT ![r] = Again(@)] /\ Fault("lost")
       /\ kafka' = IF relay'[r].phase = "init" /\ Id(r) \in kafka.valid /\ Id(r) \notin kafka.prepared THEN End(Id(r))
                   ELSE kafka
       /\ UNCHANGED repeats

\* kafka/transactional.py, _commit. "lost": it is committed, the answer is lost; "delayed": EndTxn is under way.
\* Anything but a clean commit: new producers, markers.
End_transaction(r, answer) ==
    LET clean == [relay[r] EXCEPT
            !.phase = "idle", !.confirmed = FALSE, !.which = (@ + 1) % Producers,
            !.lanes = [l \in Lanes |-> IF l \in Turn(r) THEN [@[l] EXCEPT !.pending = @ \o relay[r].lanes[l].batch,
                                                                          !.batch = <<>>]
                                       ELSE @[l]]]
        taken == Id(r) \in kafka.valid
        believed == taken /\ (answer = "ok" \/ Wrong = "settles_unconfirmed")
    IN /\ relay[r].phase = "sent" /\ relay[r].confirmed
       /\ IF answer = "ok" THEN UNCHANGED left ELSE taken /\ Fault(answer)
       /\ kafka' = IF ~taken THEN kafka
                   ELSE IF answer = "delayed" THEN [kafka EXCEPT !.delayed = @ \cup {Id(r)}]
                   ELSE [kafka EXCEPT !.prepared = @ \cup {Id(r)}]
       /\ relay' = [relay EXCEPT ![r] = IF believed THEN clean ELSE Again(@)]
       /\ UNCHANGED <<pg, repeats>>

\* A delayed EndTxn arrives: it names a producer, not a transaction.
End_late(id) ==
    /\ id \in kafka.delayed
    /\ kafka' = [kafka EXCEPT !.delayed = @ \ {id}, !.prepared = IF Is_open(id) THEN @ \cup {id} ELSE @]
    /\ UNCHANGED <<pg, relay, left, repeats>>

\* The coordinator writes the control records of a commit: readers see it.
Write_control_records(id) ==
    /\ id \in kafka.prepared
    /\ kafka' = End(id)
    /\ UNCHANGED <<pg, relay, left, repeats>>

\* The coordinator aborts a transaction that is open for too long, and fences its producer.
Time_out(id) ==
    /\ Is_open(id) /\ id \notin kafka.prepared
    /\ Fault("timeout")
    /\ kafka' = Fenced(id)
    /\ UNCHANGED <<pg, relay, repeats>>

-----------------------------------------------------------------------------
(* Failures *)

\* Kafka refuses an event. What arrived before it is settled, and the failure recorded, in one transaction under the
\* lease (settle/retries.py, record). The second refusal makes it a dead letter. The rest of the turn is read again.
Refuse(r, l) ==
    LET h == relay[r].lanes[l]
        e == IF Transactional THEN Head(h.batch) ELSE Head(h.wire)
        arrived == IF Transactional THEN <<>> ELSE SubSeq(h.batch, 1, Len(h.batch) - Len(h.wire))
        whole == [h EXCEPT !.pending = @ \o arrived]
        dies == pg.failures[e] = "due"
        settled == Settled(pg, l, whole.pending, Next_batch(h))
        after == [Without_pending(whole) EXCEPT !.batch = <<>>, !.wire = <<>>, !.sent = FALSE, !.known = @ \cup {e},
                                                !.expected = Next_batch(h)]
        sent == relay[r].phase = "sent"
        known == IF Expected(r, l) THEN after ELSE Out
        \* The transaction is aborted: nothing of the turn is published.
        aborted == [relay[r] EXCEPT
            !.phase = "idle", !.confirmed = FALSE, !.which = (@ + 1) % Producers, !.refused = @ \cup {relay[r].which},
            !.lanes = [m \in Lanes |-> IF m = l THEN known ELSE [@[m] EXCEPT !.batch = <<>>]]]
        on == [relay[r] EXCEPT !.confirmed = @ /\ Turn(r) # {l}, !.lanes[l] = known]
    IN /\ left.refusals > 0
       /\ IF Transactional THEN h.batch # <<>> /\ relay[r].phase \in {"idle", "sent"} ELSE h.wire # <<>>
       /\ Delivery # "at-most-once"
       /\ left' = [left EXCEPT !.refusals = @ - 1]
       /\ pg' = IF Expected(r, l)
                THEN Flushed([settled EXCEPT !.failures[e] = IF dies THEN "dead" ELSE "due",
                                             !.rows = IF dies THEN @ \ {e} ELSE @])
                ELSE pg
       /\ \/ relay' = [relay EXCEPT ![r] = IF sent THEN Again(@) ELSE on]
          \/ sent /\ Id(r) \in kafka.valid /\ relay' = [relay EXCEPT ![r] = aborted]
       /\ kafka' = IF sent /\ Id(r) \in kafka.valid THEN End(Id(r)) ELSE kafka
       /\ repeats' = IF Ours(r, l) THEN repeats ELSE Repeated(r, l, InFlight(h))

Reread(h) == [h EXCEPT !.batch = <<>>, !.at = 0]

\* core/loop.py, _close: after a failure, or a slow commit, all is made anew. What is open is aborted, perhaps later.
Close(r) ==
    /\ relay[r].phase # "init"
    /\ Fault("close")
    /\ relay' = [relay EXCEPT ![r] =
         IF Transactional THEN Again(@)
         ELSE [@ EXCEPT !.lanes = [l \in Lanes |-> IF @[l].sent THEN @[l] ELSE Reread(@[l])]]]
    /\ kafka' \in {kafka} \cup (IF Id(r) \in kafka.valid /\ Id(r) \notin kafka.prepared THEN {End(Id(r))} ELSE {})
    /\ UNCHANGED <<pg, repeats>>

\* kill -9; the process starts again with an empty memory, and under new ids.
Crash(r) ==
    LET old == relay[r]
    IN /\ Fault("crash")
       /\ relay' = [relay EXCEPT ![r] = [Worker EXCEPT !.process = IF Transactional THEN old.process + 1 ELSE 1]]
       /\ \E all \in BOOLEAN :
            kafka' = [kafka EXCEPT
                !.valid = {id \in @ : id[1] # r},
                !.stray = @ \cup {<<l, old.lanes[l].wire>> : l \in {m \in Lanes : all /\ old.lanes[m].wire # <<>>
                                                                       /\ Delivery = "at-least-once"}}]
       /\ repeats' = [e \in Events |-> Repeated(r, LaneOf(e), InFlight(old.lanes[LaneOf(e)]))[e]]
       /\ UNCHANGED pg

\* Postgres restarts; what was not flushed is lost. A relay notices it between its read and the check after that.
Postgres_restarts ==
    /\ Fault("postgres")
    /\ pg' = [pg EXCEPT !.history = pg.durable, !.rows = @ \cap pg.durable, !.open = {}]
    /\ relay' = [r \in Relays |->
        IF Transactional THEN (IF Turn(r) # {} /\ ~relay[r].confirmed THEN Again(relay[r]) ELSE relay[r])
        ELSE [relay[r] EXCEPT !.lanes = [l \in Lanes |-> IF @[l].sent THEN @[l] ELSE Reread(@[l])]]]
    /\ UNCHANGED <<kafka, repeats>>

-----------------------------------------------------------------------------
AllIds == kafka.prepared \cup kafka.delayed \cup {entry.id : entry \in UNION {Range(kafka.state[l]) : l \in Lanes}}

Step(r) ==
    \/ Init_id(r) \/ Replace_id(r) \/ Produce(r) \/ Confirm(r)
    \/ \E answer \in {"ok", "lost", "delayed"} : End_transaction(r, answer)
    \/ \E l \in Lanes : \/ Acquire(r, l) \/ Fence(r, l) \/ Read_marker(r, l) \/ Adopt(r, l)
                        \/ Look(r, l) \/ Read(r, l, BatchSize) \/ RaiseMark(r, l) \/ Read_stream(r, l) \/ Feedback(r, l)
                        \/ Send(r, l) \/ Arrive(r, l) \/ Acknowledge(r, l) \/ Give_up(r, l) \/ Settle(r, l)
                        \/ Refuse(r, l)

Surroundings ==
    \/ Draw \/ \E e \in Events : Commit(e) \/ Appear(e) \/ Operator(e)
    \/ \E l \in Lanes : Expire(l)
    \/ \E s \in kafka.stray : Arrive_late(s)
    \/ \E id \in AllIds \ {NoId} : End_late(id) \/ Write_control_records(id)

Faulty ==
    \/ Failover \/ Postgres_restarts
    \/ \E r \in Relays : Crash(r) \/ Close(r) \/ \E l \in Lanes : Kafka_fails(r, l) \/ Release(r, l)
    \/ \E id \in AllIds \ {NoId} : Time_out(id)

Next == Surroundings \/ Faulty \/ \E r \in Relays : Step(r)

\* Faults are few, so they stop. Then whatever can go on does.
Spec == Init /\ [][Next]_vars /\ WF_vars(Surroundings \/ \E r \in Relays : Step(r))

Symmetry == Permutations(Relays)

-----------------------------------------------------------------------------
(* What is promised *)

\* The events of a lane that are on Kafka, or will be whatever happens: read_committed sees no others.
Log(l) ==
    LET decided == SelectSeq(kafka.topic[l], LAMBDA entry : entry.id = NoId \/ entry.id \in kafka.prepared)
    IN [i \in DOMAIN decided |-> decided[i].event]
Published == UNION {Range(Log(l)) : l \in Lanes}
Times(e) == Cardinality({i \in DOMAIN Log(LaneOf(e)) : Log(LaneOf(e))[i] = e})

\* Each key in the order of ids: nothing comes before an earlier event of its key, unless that was discarded.
OrderOfAKey ==
    \A l \in Lanes : \A i \in DOMAIN Log(l) : \A e \in pg.history :
        (Keys[e] = Keys[Log(l)[i]] /\ e < Log(l)[i]) =>
            \/ e \in pg.discarded
            \/ \E j \in 1..(i - 1) : Log(l)[j] = e

\* At-most-once: some may be missing; what is there is in order, and there once.
OrderOfAKeyWithGaps ==
    \A l \in Lanes : \A i, j \in DOMAIN Log(l) : (i < j /\ Keys[Log(l)[i]] = Keys[Log(l)[j]]) => Log(l)[i] < Log(l)[j]

\* What is committed is in the outbox, on Kafka, or a dead letter.
NoLoss == \A e \in pg.history : e \in pg.rows \cup Published \cup pg.discarded \/ pg.failures[e] = "dead"

NoDouble == \A e \in Events : Times(e) <= 1

\* At-least-once: an event is repeated only if it was in flight when something failed. A batch at most is in flight.
OnlyWhatWasInFlightTwice == \A e \in Events : Times(e) <= 1 + repeats[e]
OneBatchInFlight == \A r \in Relays, l \in Lanes : Cardinality(InFlight(relay[r].lanes[l])) <= BatchSize

\* One relay at most may settle a lane.
OneMaySettle == \A l \in Lanes : Cardinality({r \in Relays : Ours(r, l)}) <= 1

\* What Postgres may lose is not on Kafka.
NothingLeftBehind == Published \subseteq pg.durable

\* Exactly-once: whoever may publish a lane knows the last batch that is on Kafka, or else its marker will tell.
NeverBlind ==
    \A r \in Relays, l \in Lanes :
        LET h == relay[r].lanes[l]
            decided == SelectSeq(kafka.state[l], LAMBDA entry : entry.id = NoId \/ entry.id \in kafka.prepared)
        IN (Expected(r, l) /\ h.stage = "held" /\ relay[r].phase = "idle") =>
                decided[Len(decided)].batch = Next_batch(h)

\* Exactly-once: whoever may still commit events of a lane is named by its row, so that the next holder fences it.
NamedInTheRow ==
    \A l \in Lanes : \A entry \in Range(kafka.state[l]) :
        LET r == entry.id[1]
            confirmed == entry.id \in kafka.valid /\ relay[r].confirmed /\ entry.id = Id(r)
        IN (entry.id # NoId /\ entry.id \notin kafka.prepared /\ (entry.id \in kafka.delayed \/ confirmed)) =>
                pg.lanes[l].names = <<r, entry.id[2]>>

\* core/marker.py, StateLost: a lane stops only if someone tampered with it.
NeverStops == \A r \in Relays, l \in Lanes : relay[r].lanes[l].stage # "stopped"

\* polling/reader.py: whoever may publish a lane knows its failures.
FailuresAreKnown == \A r \in Relays, l \in Lanes :
    (Expected(r, l) /\ relay[r].lanes[l].stage = "held") => Failing(l) \subseteq relay[r].lanes[l].known

\* Each event that is committed is published at last, or discarded by an operator.
EachIsPublished == \A e \in Events : (e \in pg.history) ~> (e \in Published \cup pg.discarded)
=============================================================================
