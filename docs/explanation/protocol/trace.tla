-------------------------------- MODULE trace --------------------------------
(* Whether the steps that relays have recorded of a lane (tests/support/protocol_trace.py) are a behaviour of the    *)
(* specification. Each process is a relay of its own. TLC looks for an order of all their steps, and for steps that   *)
(* none of them sees: Kafka's, the writers', leases that end. tests/support/traces.py writes the module `steps`.       *)
EXTENDS protocol, steps

VARIABLES
    done,           \* of each relay: how many of its steps
    count           \* of all

Left(r) == done[r] < Len(Steps[r])
Following(r) == Steps[r][done[r] + 1]
Lane(r) == relay[r].lanes[1]
Stutter == UNCHANGED vars

Taken(r, s) == Acquire(r, 1) /\ Lane(r)'.epoch = s.epoch

Initialized(r, s) == IF Transactional THEN Init_id(r) /\ relay'[r].phase = "idle" ELSE Stutter

Joined(r, s) ==
    /\ Lane(r).marker.batch = s.batch /\ Lane(r).marker.events = s.events
    /\ Adopt(r, 1)
    /\ Lane(r)'.stage = "held"

\* After a failure, turns are smaller: core/turn_sizes.py, TurnSizes.narrowed.
Read_(r, s) == Len(s.events) <= BatchSize /\ Read(r, 1, Len(s.events)) /\ Lane(r)'.batch = s.events

Sent(r, s) ==
    /\ Lane(r).batch = s.events
    /\ IF Transactional THEN Produce(r) ELSE Send(r, 1) /\ Lane(r)'.sent

Acked(r, s) == Lane(r).batch = s.events /\ Acknowledge(r, 1)

\* Exactly-once, the statement that settles a turn may be the one that confirms the next.
Confirmed(r, s) == IF relay[r].confirmed THEN Stutter ELSE Confirm(r) /\ relay'[r].confirmed

Settled_(r, s) ==
    /\ Ours(r, 1) /\ Lane(r).pending = s.events
    /\ IF Transactional THEN Confirm(r) ELSE Settle(r, 1)
    /\ Lane(r)'.stage = "held"

Committed(r, s) ==
    /\ Lane(r).batch = s.events /\ s.batch = Lane(r).expected + 1
    /\ End_transaction(r, "ok")
    /\ relay'[r].phase = "idle"

\* What is on the network may come at any later time, so it is enough to look where none of it is dropped.
Keeps_strays(r) == Lane(r).wire = <<>> \/ <<1, Lane(r).wire>> \in kafka'.stray

Failed(r, s) ==
    IF ~Transactional THEN Kafka_fails(r, 1) /\ Keeps_strays(r) /\ Lane(r)'.pending = Lane(r).pending \o s.events
    ELSE \/ /\ relay[r].phase = "init"
            /\ Stutter
         \/ Close(r)
         \/ /\ Confirm(r) \/ \E answer \in {"ok", "lost", "delayed"} : End_transaction(r, answer)
            /\ relay'[r].phase = "init"

\* Some statement has shown it, which changes nothing.
Lost(r, s) ==
    /\ ~Ours(r, 1)
    /\ \/ Stutter
       \/ /\ Confirm(r) \/ Adopt(r, 1) \/ Settle(r, 1) \/ Send(r, 1)
          /\ Lane(r)'.stage = "out"

Closed(r, s) == IF relay[r].phase = "init" \/ s.gone THEN Stutter ELSE Close(r)

Recorded(r, s) ==
    CASE s.step = "taken" -> Taken(r, s)
      [] s.step = "initialized" -> Initialized(r, s)
      [] s.step = "joined" -> Joined(r, s)
      [] s.step = "read" -> Read_(r, s)
      [] s.step = "sent" -> Sent(r, s)
      [] s.step = "acked" -> Acked(r, s)
      [] s.step = "confirmed" -> Confirmed(r, s)
      [] s.step = "settled" -> Settled_(r, s)
      [] s.step = "committed" -> Committed(r, s)
      [] s.step = "failed" -> Failed(r, s)
      [] s.step = "lost" -> Lost(r, s)
      [] s.step = "let_go" -> Stutter
      [] s.step = "closed" -> Closed(r, s)
      [] s.step = "killed" -> Crash(r)

\* What is read now was committed before, the lowest first: every order of these commits comes to the same.
Provided(s) ==
    LET wanted == {e \in pg.open : \E f \in Range(s.events) : e <= f /\ Keys[e] = Keys[f]}
    IN IF wanted # {} THEN Commit(Least(wanted)) ELSE Draw /\ \E e \in Range(s.events) : pg.drawn < e

Has_let_go(r) == done[r] > 0 /\ Steps[r][done[r]].gone

\* Steps that are not recorded, as far as the next one that is needs them.
Hidden(r, s) ==
    \/ s.step = "read" /\ (Provided(s) \/ Look(r, 1) \/ Replace_id(r))
    \/ s.step = "taken" /\ (Expire(1) \/ \E q \in Relays : Has_let_go(q) /\ Release(q, 1))
    \/ s.step = "initialized" /\ (Close(r) \/ (Init_id(r) /\ relay'[r].phase = "init"))
    \/ s.step = "joined" /\ (Fence(r, 1) \/ Read_marker(r, 1))
    \/ s.step = "closed" /\ Kafka_fails(r, 1) /\ Keeps_strays(r)
    \* What was done, but not recorded before the kill. Whatever is sent is recorded before.
    \/ /\ s.step = "killed"
       /\ \/ Init_id(r) \/ Acquire(r, 1) \/ Fence(r, 1) \/ Read_marker(r, 1) \/ Adopt(r, 1)
          \/ Confirm(r) \/ End_transaction(r, "ok") \/ Acknowledge(r, 1) \/ Settle(r, 1)

Outside ==
    \/ \E r \in Relays : Arrive(r, 1)
    \/ \E s \in kafka.stray : Arrive_late(s)
    \/ \E id \in AllIds \ {NoId} : End_late(id) \/ Write_control_records(id)

TraceInit == Init /\ done = [r \in Relays |-> 0] /\ count = 0 /\ TLCSet(1, 0)

\* Steps that ended before this one began came before it.
TraceNext ==
    \/ \E r \in Relays :
        /\ Left(r)
        /\ LET s == Following(r)
           IN /\ \A q \in Relays : done[q] >= s.after[q]
              /\ \/ /\ Recorded(r, s)
                    /\ done' = [done EXCEPT ![r] = @ + 1]
                    /\ count' = count + 1
                 \/ /\ Hidden(r, s)
                    /\ UNCHANGED <<done, count>>
    \/ /\ Outside
       /\ UNCHANGED <<done, count>>

Of_key(log, key) == SelectSeq(log, LAMBDA e : Keys[e] = key)

\* Of each key: partitions have no common order.
Begins(log, other) == Len(log) <= Len(other) /\ log = SubSeq(other, 1, Len(log))
As_seen == \A key \in Range(Keys) : Begins(Of_key(Log(1), key), Of_key(Seen, key))

\* TLC looks no farther where Kafka has what was not seen there; it prints the longest prefixes that fit.
Fits == As_seen /\ (count >= TLCGet(1) => TLCSet(1, count) /\ PrintT(<<"fits", count, done, Log(1)>>))

\* Faults do not run out here.
Without_left == <<pg, relay, kafka, repeats, done>>

\* TLC calls this violated when it has found a behaviour that explains all.
NotExplained == count < All \/ ~As_seen \/ Len(Log(1)) # Len(Seen) \/ kafka.prepared # {}
==============================================================================
