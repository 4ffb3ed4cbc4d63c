"""A schema registry for tests: a real HTTP server with the part of the REST API that clients and serializers use.

Registered schemas are served as they came in; the official Python serializer registers Protobuf as descriptors, which
is what ``format=serialized`` asks for. Compatibility is checked for Avro records only: see ``backward``.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from outbox.sandbox._ports import free_ports

NAMESPACE = uuid.UUID("6f9619ff-8b86-d011-b42d-00cf4fc964ff")


class SchemaRegistry:
    """Schemas by id and by subject; stop() and start() keep them, and the port. ``asked``: the GETs, by path."""

    def __init__(self, user: str | None = None, password: str = "", tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._token = None if user is None else base64.b64encode(f"{user}:{password}".encode()).decode()
        self.schemas: list[dict[str, Any]] = []
        self.subjects: dict[str, list[int]] = {}
        self.asked: list[str] = []
        self.backward = False
        """Refuse Avro records that can't read what the subject's latest schema wrote."""
        self.connections: set[Any] = set()
        """The addresses that have asked."""
        self.keep_alive = False
        """Leave connections open; a stopped registry then lives on in them."""
        self.guids = True
        """Off: of an older version, which knows schemas by their ids alone."""
        self.failing: int | None = None
        """A status to answer with, whatever is asked."""
        # Out of the range of outgoing connections: one of those could have it when the registry starts again.
        (self._port,) = free_ports(1)
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    @property
    def authorization(self) -> str | None:
        """The header with which it answers."""
        return None if self._token is None else f"Basic {self._token}"

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self._port}"

    def start(self) -> None:
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # One packet for the headers and one for the body would wait for the other side's delayed answer.
            wbufsize = -1
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._answer("GET", None)

            def do_POST(self) -> None:
                self._answer("POST", json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, method: str, body: Any) -> None:
                status, answer = registry.answer(method, self.path, body, self.headers.get("Authorization"))
                encoded = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(encoded)))
                registry.connections.add(self.client_address)
                if not registry.keep_alive:
                    self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(encoded)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        if self._tls is not None:
            # The handshake is made by the thread of the request, where a client that breaks it off does no harm.
            self._server.socket = self._tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, method: str, address: str, body: Any, authorization: str | None) -> tuple[int, Any]:
        if self.failing is not None:
            return self.failing, {"error_code": 50001, "message": "the store is away"}
        if self._token is not None and authorization != self.authorization:
            return 401, {"error_code": 401, "message": "Unauthorized"}
        path = [unquote(step) for step in urlsplit(address).path.strip("/").split("/")]
        with self._lock:
            if method == "GET":
                self.asked.append("/".join(path))
            match method, path:
                case "POST", ["compatibility", "subjects", subject, "versions", "latest"]:
                    return 200, {"is_compatible": self._fits(subject, body)}
                case "POST", ["subjects", subject, "versions"]:
                    return self._registered(subject, body)
                case "POST", ["subjects", subject]:
                    return self._lookup(subject, body)
                case "GET", ["schemas", *which]:
                    return self._schema(*which)
                case "GET", ["subjects", subject, "versions", version]:
                    return self._version(subject, version)
            return _missing(404, "HTTP 404")

    def _schema(self, kind: str, name: str = "") -> tuple[int, Any]:
        if kind == "types":
            return 200, ["AVRO", "JSON", "PROTOBUF"]
        # Confluent's reads an id as an int of Java, and has no such address for any other.
        if (kind == "guids" and self.guids) or (kind == "ids" and int(name) < 2**31):
            found = [schema for schema in self.schemas if str(schema[kind.removesuffix("s")]) == name]
            return (200, found[0]) if found else _missing(40403, "Schema")
        return _missing(404, "HTTP 404")

    def _registered(self, subject: str, body: Any) -> tuple[int, Any]:
        if self.backward and not self._fits(subject, body):
            return 409, {"error_code": 409, "message": "Schema being registered is incompatible"}
        return 200, self._register(subject, body)

    def _register(self, subject: str, body: Any) -> dict[str, Any]:
        wanted = {
            "schema": body["schema"],
            "schemaType": body.get("schemaType", "AVRO"),
            "references": body.get("references") or [],
        }
        guid = str(uuid.uuid5(NAMESPACE, json.dumps(wanted, sort_keys=True)))
        if all(schema["guid"] != guid for schema in self.schemas):
            self.schemas.append({**wanted, "id": len(self.schemas) + 1, "guid": guid})
        number = next(schema["id"] for schema in self.schemas if schema["guid"] == guid)
        versions = self.subjects.setdefault(subject, [])
        if number not in versions:
            versions.append(number)
        return self._shown(subject, number)

    def _fits(self, subject: str, body: Any) -> bool:
        """Return whether each field of an Avro record is in the latest schema with its type, or has a default."""
        versions = self.subjects.get(subject)
        if not versions or body.get("schemaType", "AVRO") != "AVRO":
            return True
        new, old = json.loads(body["schema"]), json.loads(self.schemas[versions[-1] - 1]["schema"])
        before = {field["name"]: field["type"] for field in old["fields"]}
        return all("default" in field or before.get(field["name"]) == field["type"] for field in new["fields"])

    def _lookup(self, subject: str, body: Any) -> tuple[int, Any]:
        if subject not in self.subjects:
            return _missing(40401, "Subject")
        for number in self.subjects.get(subject, ()):
            if self.schemas[number - 1]["schema"] == body["schema"]:
                return 200, self._shown(subject, number)
        return _missing(40403, "Schema")

    def _version(self, subject: str, version: str) -> tuple[int, Any]:
        versions = self.subjects.get(subject)
        if not versions:
            return _missing(40401, "Subject")
        place = len(versions) if version in {"latest", "-1"} else int(version)
        if not 0 < place <= len(versions):
            return _missing(40402, "Version")
        return 200, self._shown(subject, versions[place - 1])

    def _shown(self, subject: str, number: int) -> dict[str, Any]:
        version = self.subjects[subject].index(number) + 1
        return {**self.schemas[number - 1], "subject": subject, "version": version}


def _missing(code: int, what: str) -> tuple[int, Any]:
    return 404, {"error_code": code, "message": f"{what} not found"}


@contextmanager
def running(user: str | None = None, password: str = "", tls: ssl.SSLContext | None = None) -> Iterator[SchemaRegistry]:
    registry = SchemaRegistry(user, password, tls)
    registry.start()
    try:
        yield registry
    finally:
        registry.stop()
