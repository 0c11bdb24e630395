"""Configuration that would fail silently in vLLM is loud here."""

from typing import Any

import pytest
from kvreturn_connector.settings import ConfigurationError, keys_read_by, peer_allowed, read_settings

VLLM = ["bidirectional_kv_xfer", "decoder_kv_blocks_ttl", "kv_recompute_threshold", "kv_lease_duration"]
ON = {"bidirectional_kv_xfer": True}


def read(extra: dict[str, Any], role: str = "kv_consumer") -> Any:  # noqa: ANN401 - Settings
    return read_settings(extra, role, VLLM, {"KVRETURN_SECRET": "s"})


def test_defaults_are_vllms() -> None:
    settings = read(ON)
    assert (settings.ttl, settings.threshold, settings.retention_budget) == (480.0, 64, 0.5)
    assert settings.secret == b"s"


@pytest.mark.parametrize(
    ("extra", "role", "message"),
    [
        (ON | {"remote_pull_threshold": 1}, "kv_consumer", "did you mean kv_recompute_threshold?"),
        (ON | {"retention_buget": 0.3}, "kv_consumer", "did you mean retention_budget?"),
        (ON | {"zzz": 1}, "kv_consumer", "zzz is not known to this vLLM or to kvreturn, and would be ignored"),
        (ON, "kv_both", "kv_producer for prefill, kv_consumer for decode nodes"),
        ({}, "kv_consumer", "does nothing without bidirectional_kv_xfer"),
        ({"bidirectional_kv_xfer": "yes"}, "kv_consumer", "has the wrong type"),
        (ON | {"retention_budget": 1.5}, "kv_consumer", "a number from 0 to 1"),
        (ON | {"retention_budget": True}, "kv_consumer", "has the wrong type"),
        (ON | {"decoder_kv_blocks_ttl": 5}, "kv_consumer", "nothing would ever be read"),
        (ON | {"claim_timeout": 0}, "kv_consumer", "above 0 seconds"),
        (ON | {"allowed_peers": ["10.0.0.0/33"]}, "kv_producer", "allowed_peers"),
        (ON | {"allowed_peers": "10.0.0.1"}, "kv_producer", "has the wrong type"),
    ],
)
def test_what_would_fail_silently_is_refused_with_what_to_do(extra: dict[str, Any], role: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("?", r"\?")):
        read(extra, role)


def test_off_on_purpose_is_fine() -> None:
    assert read({"bidirectional_kv_xfer": False}).bidirectional is False


def test_the_keys_of_the_installed_vllm_are_found_in_its_source() -> None:
    import kvreturn_connector.pins  # noqa: PLC0415 - any module that reads none

    assert keys_read_by([kvreturn_connector.pins]) == set()


@pytest.mark.parametrize(
    ("host", "allowed", "answer"),
    [
        ("10.1.2.3", [], True),
        ("127.0.0.1", [], True),
        ("::1", [], True),
        ("fd00::7", [], True),
        ("8.8.8.8", [], False),
        ("169.254.169.254", [], True),  # link-local is private to ipaddress; list the peers to be stricter
        ("node-1", [], False),
        ("localhost", [], True),
        ("localhost", ["10.0.0.0/8"], False),
        ("node-1", ["node-1"], True),
        ("10.1.2.3", ["10.0.0.0/8"], True),
        ("192.168.0.1", ["10.0.0.0/8"], False),
        ("8.8.8.8", ["8.8.8.8"], True),
        ("", [], False),
    ],
)
def test_peers(host: str, allowed: list[str], answer: bool) -> None:  # noqa: FBT001 - a table
    assert peer_allowed(host, allowed) is answer
