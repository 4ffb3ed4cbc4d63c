"""``outbox …`` that waits two seconds, and not ten, for a broker to write the markers of a transaction that has ended.

For tests of transactions that never end: each look at them waits so long. Nothing else differs.
"""

from __future__ import annotations

from relay.cli import main
from relay.kafka.state_topic import StateTopic

if __name__ == "__main__":
    defaults = StateTopic.__init__.__kwdefaults__
    assert defaults is not None
    assert "decide_seconds" in defaults
    defaults["decide_seconds"] = 2.0
    main()
