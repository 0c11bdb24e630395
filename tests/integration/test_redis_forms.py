"""Every form of a store's URL, with real servers: a socket, TLS, a database, an ACL user, a cluster, sentinels."""

import contextlib
import datetime as dt
import ipaddress
import subprocess
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support.envoy import unused_address
from support.redis import BINARY, Server, cluster, conversation, needs_redis, recovered, server, sharing

pytestmark = needs_redis
WARM = ["first_turn", "hit"]


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvreturn tests")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


async def test_a_socket_and_a_database(tmp_path: Path) -> None:
    with server(tmp_path) as one:
        async with sharing(f"unix://{tmp_path}/{one.port}.sock?db=3") as router:
            assert await conversation(router, "Hi") == WARM
        async with sharing(f"redis://127.0.0.1:{one.port}/3") as router:
            assert await conversation(router, "Hello") == WARM
        assert b"db3:" in one.ask("INFO", "keyspace")
        assert b"db0:" not in one.ask("INFO", "keyspace")


async def test_tls_with_a_user_who_may_do_no_more_than_needed(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    port = unused_address().rpartition(":")[2]
    tls = ("--tls-port", port, "--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    with server(tmp_path, *tls) as one:
        data = ("+set", "+get", "+del", "+zadd", "+zrange", "+zremrangebyrank", "+pexpireat")
        allowed = (*data, "+evalsha", "+script|load", "+ping")
        assert one.ask("ACL", "SETUSER", "kv", "on", ">p@ss:word/", "~kvr1*", *allowed).startswith(b"+OK")
        url = f"rediss://kv:p%40ss%3Aword%2F@127.0.0.1:{port}"
        async with sharing(f"{url}?ssl_ca_certs={cert}") as router:
            assert await conversation(router, "Hi") == WARM
        async with sharing(url) as router:  # whose certificate nobody vouches for
            assert await conversation(router, "Hi") == ["store_unavailable", "store_unavailable"]


async def test_a_cluster_one_of_whose_nodes_dies_and_comes_back(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        async with sharing(f"redis+cluster://127.0.0.1:{nodes[0].port}") as router:
            for i in range(5):
                assert await conversation(router, f"Hi {i}") == WARM
            assert b"keys=0" not in nodes[0].ask("INFO", "keyspace")
            assert all(b"db0:keys" in node.ask("INFO", "keyspace") for node in nodes)
            nodes[1].kill()
            lost = [word for i in range(8) for word in await conversation(router, f"Hello {i}")]
            assert "store_unavailable" in lost
            nodes[1].start()
            await recovered(router, 10.0)


@contextlib.contextmanager
def sentinel(folder: Path, primary: Server) -> Iterator[int]:
    """A sentinel that watches this primary as `main`. Gives its port."""
    assert BINARY
    port = int(unused_address().rpartition(":")[2])
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nlogfile {folder}/sentinel.log\n"
        f"sentinel monitor main 127.0.0.1 {primary.port} 1\n"
        "sentinel down-after-milliseconds main 300\nsentinel failover-timeout main 1000\n"
    )
    process = subprocess.Popen([BINARY, str(config), "--sentinel"])
    try:
        yield port
    finally:
        process.kill()
        process.wait()


async def test_sentinels_lead_to_the_primary_of_the_day(tmp_path: Path) -> None:
    with server(tmp_path) as first, server(tmp_path, "--replicaof", "127.0.0.1", str(first.port)) as second:
        while b"master_link_status:up" not in second.ask("INFO", "replication"):
            pass
        with sentinel(tmp_path, first) as port:
            async with sharing(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/main") as router:  # one is not there
                await recovered(router, 5.0)  # the sentinel may still be starting
                first.kill()
                await recovered(router, 15.0)
                assert b"role:master" in second.ask("INFO", "replication")
