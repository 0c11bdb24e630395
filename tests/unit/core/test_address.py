import pytest

from kvreturn.core.address import is_local, split_address


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.7:8000", "10.0.0.7", 8000),
        ("vllm-0.vllm.svc:1", "vllm-0.vllm.svc", 1),
        ("localhost:65535", "localhost", 65535),
        ("[fd00::1]:8200", "fd00::1", 8200),
        ("[::]:80", "::", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":",
        "host",
        "host:",
        ":80",
        "host:0",
        "host:65536",
        "host:-1",
        "host:+80",
        "host: 80",
        "host:8o",
        "host:\uff18\uff10",
        "fd00::1:80",
        "::1:80",
        "[fd00::1]",
        "[fd00::1]80",
        "[]:80",
        "[10.0.0.1]:80",
        "[host]:80",
        "http://host:80",
        "two words:80",
        "host\n:80",
        "host/x:80",
        "user@host:80",
    ],
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        split_address(address)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("", True),
        ("localhost", True),
        ("LocalHost", True),
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("0.0.0.0", True),
        ("::1", True),
        ("::", True),
        ("::ffff:127.0.0.1", True),
        ("0:0:0:0:0:0:0:1", True),
        ("10.0.0.7", False),
        ("128.0.0.1", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.7", False),
        ("localhost.example.org", False),
        ("vllm-0", False),
        ("[::1]", False),
    ],
)
def test_which_hosts_name_no_machine_to_anybody_else(host: str, local: bool) -> None:  # noqa: FBT001
    assert is_local(host) is local
