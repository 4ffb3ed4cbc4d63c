"""Effects outside the database that count once: reserved in a transaction, called until the outcome is known."""

from outbox.external.declaration import Call, Done, External, OutcomeUnknown, Refused, Settled, TryLater
from outbox.external.http_call import HttpAsk, HttpCall

__all__ = ["Call", "Done", "External", "HttpAsk", "HttpCall", "OutcomeUnknown", "Refused", "Settled", "TryLater"]
