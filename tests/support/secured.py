"""A Postgres and a Kafka behind TLS and passwords, and certificates for them: what their tests share."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import psycopg
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kafka_proxy import ProxiedKafka
from proxy import TcpProxy
from support import wait_until

from outbox.sandbox.postgres import PostgresServer

PASSWORD = "correct h#rse/?%@[:"


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: a certificate authority, and another one; a server's key and certificate, by the first one.

    The server's certificate is for 127.0.0.1, and not for localhost. ``other``: as the other one would make them.
    """

    authority: Path
    stranger: Path
    key: Path
    certificate: Path
    other: Certificates | None = None

    @staticmethod
    def made(directory: Path) -> Certificates:
        files = [directory / f"{name}.pem" for name in ("authority", "stranger")]
        made = []
        for file, issuer in zip(files, [_certificate(file.stem, None, file) for file in files], strict=True):
            key, certificate = directory / f"{file.stem}-server.key", directory / f"{file.stem}-server.pem"
            _certificate("server", issuer, certificate, key)
            made.append((key, certificate))
        return Certificates(*files, *made[0], Certificates(*reversed(files), *made[1]))


# Of a listener: Kafka's default of num.network.threads.
_NETWORK_THREADS: Final = 3
_SIGNS: Final = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


def _certificate(
    name: str, issuer: tuple[Any, Any] | None, file: Path, key_file: Path | None = None
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    signer = key if issuer is None else issuer[1]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=7))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        # Python 3.13 wants these three.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if issuer is None:
        builder = builder.add_extension(_SIGNS, critical=True)
    else:
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = builder.add_extension(names, critical=False)
    made = builder.sign(signer, hashes.SHA256())
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    if key_file is not None:
        plain = serialization.NoEncryption()
        text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        key_file.write_bytes(text)
        key_file.chmod(0o600)
    return made, key


@dataclass(frozen=True)
class SecuredKafka:
    """A Kafka that wants TLS, SCRAM or OAUTHBEARER, and rights.

    admin    a superuser's client.
    plain    the address of the other listener, where everybody is a superuser.
    options  of the user ``outbox``, who has no rights yet.
    proxy    before the listener with TLS.
    """

    certificates: Certificates
    admin: AdminClient
    plain: str
    options: dict[str, str]
    proxy: TcpProxy

    def show(self, certificates: Certificates) -> None:
        """Give the broker another certificate, and close the connections of all clients."""
        changes = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in _keystore(certificates).items()
        ]
        wanted = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=changes)
        for answer in self.admin.incremental_alter_configs([wanted]).values():
            answer.result(30)
        shown = certificates.certificate.read_text()

        def is_shown() -> bool:
            # The broker's network threads take it one after another, and connections in turn.
            address = "127.0.0.1", self.proxy.port
            return all(ssl.get_server_certificate(address) == shown for _ in range(3 * _NETWORK_THREADS))

        wait_until(is_shown, what="the certificate")
        self.proxy.cut()

    @property
    def settings(self) -> dict[str, str]:
        """The options as settings of a relay."""
        return {f"kafka__{name.replace('.', '_')}": value for name, value in self.options.items()}


@contextmanager
def secured_kafka(directory: Path) -> Iterator[SecuredKafka]:
    """Start one, with certificates in a directory."""
    certificates = Certificates.made(directory)
    settings = {
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXIED:SASL_SSL,CONTROLLER:PLAINTEXT",
        **_keystore(certificates),
        "listener.name.proxied.sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        **{
            f"listener.name.proxied.{mechanism}.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            )
            for mechanism in ("scram-sha-256", "scram-sha-512")
        },
        # Without more than that the broker takes unsigned tokens.
        "listener.name.proxied.oauthbearer.sasl.jaas.config": (
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;"
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    with TcpProxy("127.0.0.1", None) as proxy, ProxiedKafka(proxy, settings=settings) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
        set_password(admin, "outbox", PASSWORD)
        options = {
            "bootstrap.servers": proxy.address,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(certificates.authority),
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": "outbox",
            "sasl.password": PASSWORD,
        }
        yield SecuredKafka(certificates, admin, cluster.bootstrap_servers, options, proxy)


def _keystore(certificates: Certificates) -> dict[str, str]:
    return {
        "listener.name.proxied.ssl.keystore.type": "PEM",
        "listener.name.proxied.ssl.keystore.key": certificates.key.read_text(),
        "listener.name.proxied.ssl.keystore.certificate.chain": certificates.certificate.read_text(),
    }


def set_password(admin: AdminClient, user: str, password: str) -> None:
    """Make or change a user of both SCRAM mechanisms."""
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        # Kafka takes only one change of a user in a request.
        wanted = UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), password.encode())
        for answer in admin.alter_user_scram_credentials([wanted]).values():
            answer.result(30)


def allow(admin: AdminClient, kind: ResourceType, name: str, *operations: AclOperation) -> None:
    """Grant the user ``outbox`` operations on a resource, whose name may be a prefix ending in ``*``."""
    prefixed = name.endswith("*") and len(name) > 1
    pattern = ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL
    rules = [
        AclBinding(kind, name.rstrip("*") or "*", pattern, "User:outbox", "*", operation, AclPermissionType.ALLOW)
        for operation in operations
    ]
    for answer in admin.create_acls(rules).values():
        answer.result(30)


def revoke_all(admin: AdminClient) -> None:
    """Delete all rights that were granted on a broker."""
    anyone = ResourcePatternType.ANY, None, None
    rules = AclBindingFilter(ResourceType.ANY, None, *anyone, AclOperation.ANY, AclPermissionType.ANY)
    admin.delete_acls([rules])[rules].result(30)


class TlsFront:
    """TLS before a Postgres that has none: it answers a client's request for it and forwards what comes inside."""

    def __init__(self, certificates: Certificates, port: int) -> None:
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificates.certificate, certificates.key)
        self._upstream = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._server = server.result(60)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # What a client breaks off, such as a handshake with a certificate that it does not trust, ends here.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            try:
                while (await reader.readexactly(8))[4:] != _WANTS_TLS:
                    writer.write(b"N")
                writer.write(b"S")
                await writer.start_tls(self._tls)
                there, back = await asyncio.open_connection("127.0.0.1", self._upstream)
                try:
                    await asyncio.gather(_pump(reader, back), _pump(there, writer))
                finally:
                    back.close()
            finally:
                writer.close()


_WANTS_TLS: Final = (80877103).to_bytes(4)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while content := await reader.read(65536):
        writer.write(content)
        await writer.drain()
    writer.close()


@contextmanager
def secured_postgres(certificates: Certificates) -> Iterator[tuple[PostgresServer, int]]:
    """Start a Postgres that wants a password (SCRAM) of everybody but the superuser; yield it and its port with TLS."""
    with PostgresServer(settings={"fsync": "off", "password_encryption": "scram-sha-256"}) as server:
        (server.data_dir / "pgdata" / "pg_hba.conf").write_text(
            "host all postgres 127.0.0.1/32 trust\n"
            "host all all 127.0.0.1/32 scram-sha-256\n"
            "host replication all 127.0.0.1/32 scram-sha-256\n"
        )
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("SELECT pg_reload_conf()")
        with TlsFront(certificates, server.port) as front:
            yield server, front.port
