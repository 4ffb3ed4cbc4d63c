from contextlib import ExitStack
import pytest, time
from inbox_support import Log
NAMES = [{"group.instance.id": name} for name in ("a", "b")]

@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
@pytest.mark.parametrize("order", [(0,), (1,), (1, 0)])
def test_a_static_group_whose_topics_were_changed(outbox_postgres, outbox_kafka, order, strategy):
    log = Log(outbox_postgres, outbox_kafka, partitions=3)
    def consume(effects, which):
        with ExitStack() as members:
            all_ = [members.enter_context(log.consuming(kafka={**NAMES[n], "partition.assignment.strategy": strategy})) for n in which]
            for part in range(3):
                log.produce([f"k{part}"], partition=part)
            t=time.monotonic()
            all_[0].wait(lambda: log.count() == effects, "the effects")
            print("TOOK", order, strategy, which, time.monotonic()-t)
            if len(which)>1 and effects==3: time.sleep(5)
    consume(3, (0, 1))
    old, log.topic = log.topic, outbox_kafka.create_topic(outbox_kafka.name("new"), 3)
    outbox_kafka._admin.delete_topics([old])[old].result(30)
    consume(6, order)
