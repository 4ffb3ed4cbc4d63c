"""A proxy that breaks connections to Kafka where a test says so, request by request."""

from __future__ import annotations

import socket
import struct
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from proxy import Connection, TcpProxy

from outbox.sandbox._broker import Node
from outbox.sandbox._ports import free_ports
from outbox.sandbox._process import patience
from outbox.sandbox.kafka import KafkaCluster

PRODUCE: Final = 0
FETCH: Final = 1
LIST_OFFSETS: Final = 2
METADATA: Final = 3
OFFSET_FETCH: Final = 9
JOIN_GROUP: Final = 11
CREATE_TOPICS: Final = 19
INIT_PRODUCER_ID: Final = 22
ADD_PARTITIONS_TO_TXN: Final = 24
END_TXN: Final = 26
TXN_OFFSET_COMMIT: Final = 28
DESCRIBE_CONFIGS: Final = 32

_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Action:
    """What is done to a request or to its answer."""

    name: str
    seconds: float | None = None
    edit: Callable[[bytes], bytes] | None = None
    hook: Callable[[], object] | None = None


drop_request: Final = Action("drop_request")
"""Swallow the request and close the client's connection: the broker never sees it."""

drop_response: Final = Action("drop_response")
"""Let the broker act on the request, swallow its answer and close the client's connection."""

duplicate_request: Final = Action("duplicate_request")
"""Send the request twice and swallow the second answer."""


def delay_request(seconds: float | None = None) -> Action:
    """Close the client's connection at once; the broker gets the request by the old connection, but later.

    That is a packet that was late in the network: the client may have connected anew and retried meanwhile. It arrives
    after these seconds or at ``KafkaProxy.release``, whichever comes first; None: only then.
    """
    return Action("delay_request", seconds)


def delay_response(seconds: float | None = None) -> Action:
    """Hold the answer, and what follows on the connection, for these seconds or until ``KafkaProxy.release``."""
    return Action("delay_response", seconds)


def edit_response(edit: Callable[[bytes], bytes]) -> Action:
    """Return the client what ``edit`` makes of the answer; both without the size."""
    return Action("edit_response", edit=edit)


def corrupted(response: bytes) -> bytes:
    """Change one byte in the middle of what was fetched; shorter answers have no messages."""
    if len(response) < 20_000:
        return response
    middle = len(response) // 2
    return response[:middle] + bytes([response[middle] ^ 1]) + response[middle + 1 :]


def after_request(hook: Callable[[], object]) -> Action:
    """Call ``hook`` as soon as the request is on its way to the broker, and before the client gets an answer."""
    return Action("after_request", hook=hook)


def instead_of_response(hook: Callable[[], object]) -> Action:
    """Call ``hook`` when the broker has answered, swallow the answer and close the client's connection."""
    return Action("instead_of_response", hook=hook)


@dataclass(eq=False, slots=True)
class Fired:
    """An action that a request met."""

    action: Action
    api_key: int
    api_version: int
    response: bytes | None = None
    """The broker's answer, without its size; of duplicate_request the second one."""
    done: bool = False
    """Nothing more will come of it."""
    released: bool = False

    @property
    def held(self) -> bool:
        """Return whether its request or answer waits, or will wait."""
        return self.action.name in {"delay_request", "delay_response"} and not (self.released or self.done)


@dataclass(slots=True)
class _Rule:
    api_key: int
    action: Action
    times: int
    skip: int


class KafkaConnection(Connection):
    """A connection with what is known of its stream of frames."""

    def __init__(self, client: socket.socket) -> None:
        super().__init__(client)
        self.requests = bytearray()
        self.responses = bytearray()
        self.awaited: defaultdict[int, deque[Fired | None]] = defaultdict(deque)
        """By correlation id: the action for each answer that is still to come."""
        self.fired: list[Fired] = []


class KafkaProxy(TcpProxy):
    """Between clients and one broker, whose advertised address has to be the proxy's; see KafkaCluster.

    Reads the frames of the Kafka protocol without TLS and SASL: size, API key, API version, correlation id.
    """

    connection_type = KafkaConnection

    def __init__(self) -> None:
        super().__init__("127.0.0.1", None)
        self._seen: Counter[int] = Counter()
        self._rules: list[_Rule] = []
        self._fired: list[Fired] = []

    def on(self, api_key: int, action: Action, times: int = 1, skip: int = 0) -> None:
        """Do ``action`` to the next ``times`` requests of this kind, after letting ``skip`` of them pass.

        Rules for the same kind are used up one after the other.
        """
        with self._changed:
            self._rules.append(_Rule(api_key, action, times, skip))

    def clear(self) -> None:
        """Forget the rules that are not used up. What is held stays held."""
        with self._changed:
            self._rules.clear()

    def seen(self, api_key: int) -> int:
        """How many requests of this kind clients have sent so far, those included that were dropped or are held."""
        with self._changed:
            return self._seen[api_key]

    def wait_seen(self, api_key: int, count: int) -> None:
        """Wait until there were this many requests of a kind. AssertionError when the time passes without."""
        with self._changed:
            seen = self._changed.wait_for(lambda: self._seen[api_key] >= count, _SECONDS * patience())
            assert seen, f"{self._seen[api_key]} requests of API key {api_key} and not {count} in time"

    @property
    def fired(self) -> list[Fired]:
        """The actions that requests met so far, in that order."""
        with self._changed:
            return list(self._fired)

    def wait_done(self) -> None:
        """Wait until every fired action is through: answers have come or their connections have ended.

        AssertionError when the time passes first.
        """
        with self._changed:
            self._wait_done(self._fired)

    def release(self) -> list[Fired]:
        """Let go of what is held, and wait until the broker has answered (or the client was given the answer).

        Gives what was let go; nothing, if nothing was held. AssertionError when the time passes first.
        """
        with self._changed:
            held = [fired for fired in self._fired if fired.held]
            for fired in held:
                fired.released = True
            self._changed.notify_all()
            self._wait_done(held)
        return held

    def _wait_done(self, those: Sequence[Fired]) -> None:
        """Wait until nothing more will come of them. The lock is held."""
        done = self._changed.wait_for(lambda: all(fired.done for fired in those), _SECONDS * patience())
        assert done, f"not through in time: {[fired for fired in those if not fired.done]}"

    # -- the frames

    def _from_client(self, connection: Connection, data: bytes) -> None:
        assert isinstance(connection, KafkaConnection)
        connection.requests += data
        for frame in _frames(connection.requests):
            self._request(connection, frame)
            if connection.closed or connection.client_gone:
                return  # what the client sent after this request is lost with its connection

    def _request(self, connection: KafkaConnection, frame: bytes) -> None:
        api_key, api_version, correlation = struct.unpack_from(">hhi", frame, 4)
        with self._changed:
            self._seen[api_key] += 1
            action = self._match(api_key)
            fired = None
            if action is not None:
                fired = Fired(action, api_key, api_version)
                connection.fired.append(fired)
                self._fired.append(fired)
            if action != drop_request:
                awaited = connection.awaited[correlation]
                awaited.extend((None, fired) if action == duplicate_request else (fired,))
            self._changed.notify_all()
        if fired is None:
            self._to_target(connection, frame)
        elif fired.action == drop_request:
            self._close(connection)
        elif fired.action == duplicate_request:
            self._to_target(connection, frame + frame)
        else:
            hook, name = fired.action.hook, fired.action.name
            if name == "delay_request":
                self._close_client(connection)
                self._hold(connection, fired)
            self._to_target(connection, frame)
            if name == "after_request" and hook is not None:
                hook()

    def _from_target(self, connection: Connection, data: bytes) -> None:
        assert isinstance(connection, KafkaConnection)
        connection.responses += data
        for frame in _frames(connection.responses):
            (correlation,) = struct.unpack_from(">i", frame, 4)
            with self._changed:
                awaited = connection.awaited[correlation]
                fired = awaited.popleft() if awaited else None
                if not awaited:
                    del connection.awaited[correlation]
            if fired is None:
                self._to_client(connection, frame)
            else:
                self._response(connection, frame, fired)

    def _response(self, connection: KafkaConnection, frame: bytes, fired: Fired) -> None:
        fired.response = frame[4:]
        if fired.action.name == "delay_response":
            self._hold(connection, fired)
            self._to_client(connection, frame)
        elif fired.action.edit is not None:
            edited = fired.action.edit(fired.response)
            self._to_client(connection, struct.pack(">i", len(edited)) + edited)
        elif fired.action.name == "after_request":
            self._to_client(connection, frame)
        elif fired.action != duplicate_request:
            if fired.action.hook is not None:
                fired.action.hook()
            self._close(connection)
        with self._changed:
            fired.done = True
            self._changed.notify_all()

    def _match(self, api_key: int) -> Action | None:
        """Use up the first rule for this kind of request. The lock is held."""
        for rule in self._rules:
            if rule.api_key != api_key:
                continue
            if rule.skip:
                rule.skip -= 1
                return None
            rule.times -= 1
            if not rule.times:
                self._rules.remove(rule)
            return rule.action
        return None

    def _hold(self, connection: KafkaConnection, fired: Fired) -> None:
        """Wait until its time is over, it is released, or the connection is closed."""
        with self._changed:
            self._changed.wait_for(lambda: fired.released or connection.closed, fired.action.seconds)
            fired.released = True

    def _ended(self, connection: Connection) -> None:
        assert isinstance(connection, KafkaConnection)
        for fired in connection.fired:
            fired.done = True


def _frames(buffer: bytearray) -> Iterator[bytes]:
    """Take the whole frames from the front of a buffer, each with its size before it."""
    while len(buffer) >= 4:
        end = 4 + int.from_bytes(buffer[:4])
        if len(buffer) < end:
            return
        frame = bytes(buffer[:end])
        del buffer[:end]
        yield frame


class ProxiedKafka(KafkaCluster):
    """As many brokers as proxies, 1 or 3, each with one more listener, which advertises the port of its proxy.

    The proxies lead there. ``bootstrap_servers`` bypasses them, and so does the brokers' own traffic.
    """

    def __init__(self, *proxies: TcpProxy, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(brokers=len(proxies), settings=settings)
        self._proxies = dict(zip(free_ports(len(proxies)), proxies, strict=True))
        for port, proxy in self._proxies.items():
            proxy.lead_to(port)

    def _properties(self, node: Node) -> dict[str, str]:
        port, proxy = list(self._proxies.items())[node.number - 1]
        more = {
            "listener.security.protocol.map": "PROXIED:PLAINTEXT",
            "listeners": f"PROXIED://127.0.0.1:{port}",
            "advertised.listeners": f"PROXIED://127.0.0.1:{proxy.port}",
        }
        found = super()._properties(node)
        return found | {name: f"{found[name]},{value}" for name, value in more.items() if name not in self._settings}
