"""What `kvreturn doctor --offline` finds in files: the router's settings and the nodes' command lines."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, example, given
from hypothesis import settings as settings_of_tests
from hypothesis import strategies as st
from kvreturn_connector.settings import OWN_KEYS

from kvreturn.cli.main import main
from kvreturn.doctor import keys
from kvreturn.doctor.agree import agree
from kvreturn.doctor.files import read_launches
from kvreturn.doctor.nodefiles import read_files

OURS = "kvreturn_connector.connector"
SETTINGS = {"pools": {"prefill": ["10.0.0.1:8000"], "decode": ["10.0.0.2:8000"]}, "secret": "s"}
OFF = {"bidirectional_kv_xfer": False}
Found = dict[str, list[tuple[str, str, str]]]


def transfer(role: str = "kv_producer", *, stock: bool = False, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """A `--kv-transfer-config`; `changes` are members of its extra config, or of itself."""
    extra = {"bidirectional_kv_xfer": True, **changes.pop("extra", {})}
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra, **changes}
    return config if stock else {"kv_connector_module_path": OURS, **config}


def line(config: dict[str, Any], options: str = "", environ: str = "KVRETURN_SECRET=s") -> str:
    return f"{environ} vllm serve m {options} --kv-transfer-config '{json.dumps(config)}'"


def doctor(folder: Path, *nodes: str, settings: Any = None, arguments: tuple[str, ...] = ()) -> tuple[Result, Found]:  # noqa: ANN401 - YAML
    """Run it on these node files. Returns also status, finding and remedy by check."""
    path = folder / "kvreturn.yaml"
    path.write_text(settings if isinstance(settings, str) else yaml.safe_dump({**SETTINGS, **(settings or {})}))
    for number, text in enumerate(nodes):
        (folder / f"node{number}").write_text(text)
    files = [word for number in range(len(nodes)) for word in ("--node-config", str(folder / f"node{number}"))]
    ran = CliRunner().invoke(main, ["doctor", "--offline", "--json", "--config", str(path), *files, *arguments])
    found: Found = {}
    for f in json.loads(ran.stdout)["findings"]:
        found.setdefault(f["check"], []).append((f["status"], f["found"], f["remedy"]))
    return ran, found


P = line(transfer(), "--block-size 16 --enable-prefix-caching")
D = line(transfer("kv_consumer"), "--block-size=16 --enable-prefix-caching")


def test_files_that_fit_are_ok(tmp_path: Path) -> None:
    ran, found = doctor(tmp_path, P, D)
    assert ran.exit_code == 0
    assert {check for check, all_of in found.items() if {status for status, *_ in all_of} - {"ok"}} <= {
        "live",
        "flags.kv_cache_dtype",
        "flags.tensor_parallel_size",
        "versions.vllm",
    }
    assert found["live"] == [("skipped", "--offline: nothing that runs was looked at", "")]


@pytest.mark.parametrize(
    ("p", "d", "check", "status", "finding", "remedy"),
    [
        (line(transfer(extra={"remote_pull_threshold": 64})), D, "node_config.keys", "fail",
         "remote_pull_threshold is read by nothing in vLLM 0.32.0", "kv_recompute_threshold"),
        (line(transfer(extra={"decoder_kv_block_ttl": 9}, stock=True)), D, "node_config.keys", "fail",
         "ignored without a word", "write decoder_kv_blocks_ttl"),
        (line(transfer(extra={"retention_budget": 0.3}, stock=True)), D, "node_config.keys", "fail",
         "read by the kvreturn connector only", ""),
        (line(transfer(kv_rank=0)), D, "node_config.keys", "fail", "vLLM does not start with kv_rank", "remove it"),
        (line(transfer(kv_load_failure_policies="fail")), D, "node_config.keys", "fail", "does not start",
         "kv_load_failure_policy"),
        (line(transfer(extra={"bidirectional_kv_xfer": "true"})), D, "node_config.keys", "fail", "no boolean", "true"),
        (P, line({**transfer("kv_consumer"), "kv_connector_extra_config": {}}), "node_config.keys", "fail",
         "does not start without bidirectional_kv_xfer", "true"),
        (P, "vllm serve m", "node_config", "fail", "no --kv-transfer-config", "add one"),
        (P, "vllm serve m --kv-transfer-config '{'", "node_config", "fail", "is no JSON", "Kubernetes"),
        (P, "{}", "node_config", "fail", "neither a vLLM command line", "Kubernetes"),
        (P, "vllm 'serve", "node_config", "fail", "is no command line", "Kubernetes"),
        (P, line(transfer("kv_consumer"), environ=""), "node_config.secret", "warn", "KVRETURN_SECRET", "set it"),
        (P, line(transfer("kv_consumer", extra=OFF)), "flags.bidirectional_kv_xfer", "fail",
         "its turns leave no handle", "true"),
        (line(transfer(extra=OFF)), D, "flags.bidirectional_kv_xfer", "fail",
         "reads nothing back", "true"),
        (line(transfer(extra=OFF, stock=True)), D, "flags.bidirectional_kv_xfer", "fail",
         "hangs", "true"),
        (line(transfer("kv_both")), D, "flags.kv_role", "fail", "does not start", "kv_producer"),
        (line(transfer("kv_both", stock=True)), D, "flags.kv_role", "warn", "leaves open", "kv_producer"),
        (line(transfer(stock=True)), D, "flags.connector", "warn", "ignores sealed handles", "kvreturn-connector"),
        (P, line(transfer("kv_consumer", stock=True)), "flags.connector", "fail", "prove nothing",
         "kvreturn-connector"),
        (P, line({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_consumer"}), "flags.connector", "fail",
         "another connector", "kvreturn-connector"),
        (line(transfer(stock=True, kv_load_failure_policy="recompute")), D, "flags.kv_load_failure_policy", "fail",
         "hangs", "fail"),
        (line(transfer(kv_load_failure_policy="recompute")), D, "flags.kv_load_failure_policy", "ok", "computes", ""),
        (line(transfer(), "--block-size 32"), D, "flags.block_size", "fail", "differs", "--block-size"),
        (line(transfer(), "--kv-cache-dtype fp8"), line(transfer("kv_consumer"), "--kv-cache-dtype auto"),
         "flags.kv_cache_dtype", "fail", "differs", "--kv-cache-dtype"),
        (line(transfer(), "-tp 2"), line(transfer("kv_consumer"), "--tensor_parallel_size 1"),
         "flags.tensor_parallel_size", "warn", "differs", "compare answers"),
        (line(transfer(), "--no-enable-prefix-caching"), D, "flags.prefix_caching", "warn", "off",
         "--enable-prefix-caching"),
        (P, line(transfer("kv_consumer", extra={"decoder_kv_blocks_ttl": 455})), "ttl", "fail", "hand out handles",
         "below 450"),
        (P, line(transfer("kv_consumer", extra={"decoder_kv_blocks_ttl": 5})), "ttl", "fail", "declines reads", "480"),
        (line(transfer(extra={"kv_recompute_threshold": 500})), D, "flags.kv_recompute_threshold", "warn",
         "spent unread", "limits.min_tokens to 500"),
        (line(transfer(), environ="UCX_TLS=tcp,self,sm"), D, "transport", "warn", "over TCP, the fallback", "rc"),
        (line(transfer(), environ="UCX_TLS=cuda_copy"), D, "transport", "warn", "names no transport of a fabric", "rc"),
        (line(transfer(), environ="UCX_TLS=rc,cuda_copy"), D, "transport", "ok", "UCX_TLS=rc,cuda_copy", ""),
        (line(transfer(), environ="UCX_TLS=^tcp"), D, "transport", "ok", "takes the best it finds", ""),
        (P, D, "transport", "ok", "UCX_TLS is unset", ""),
        (line(transfer(extra={"backends": ["LIBFABRIC"]})), D, "transport", "fail", "differs", "same `backends`"),
        (line(transfer(), environ="PYTHONHASHSEED=1"), line(transfer("kv_consumer")), "flags.hash_seed", "ok",
         "does not depend on it", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_with_nodes_is_named(  # noqa: PLR0917 - as parametrized
    tmp_path: Path, p: str, d: str, check: str, status: str, finding: str, remedy: str
) -> None:
    ran, found = doctor(tmp_path, p, d)
    assert any(s == status and finding in f and remedy in r for s, f, r in found[check]), found[check]
    assert ran.exit_code == (1 if any(s == "fail" for all_of in found.values() for s, *_ in all_of) else 0)


@pytest.mark.parametrize(
    ("settings", "check", "status", "finding"),
    [
        ("pools: [", "config", "fail", "not YAML"),
        ({"pool": {}}, "config", "fail", "did you mean `pools`?"),
        ({"secret": ""}, "config.secret", "warn", "no secret"),
        ({"tenant_header": "x-tenant"}, "config.tenants", "ok", "x-tenant"),
        ({"return": "eager"}, "flags.prefix_caching", "fail", "nothing stays"),
        ({"store": {"ttl": 480}}, "ttl", "fail", "hand out handles"),
        ({"limits": {"min_tokens": 10}}, "flags.kv_recompute_threshold", "warn", "limits.min_tokens 10"),
    ],
)
def test_what_is_wrong_with_the_settings_is_named(
    tmp_path: Path,
    settings: Any,  # noqa: ANN401 - YAML
    check: str,
    status: str,
    finding: str,
) -> None:
    uncached = line(transfer(), "--block-size 16 --no-enable-prefix-caching")
    _, found = doctor(tmp_path, uncached, D, settings=settings)
    assert any(s == status and finding in f for s, f, _ in found[check]), found[check]


def test_a_path_is_shown_once_and_the_line_with_it(tmp_path: Path) -> None:
    path = tmp_path / "kvreturn.yaml"
    for text, shown in ((None, "No such file or directory"), ("pools:\n  prefill: 3\n", "line 2: pools.prefill: ")):
        if text:
            path.write_text(text)
        ran = CliRunner().invoke(main, ["doctor", "--offline", "--config", str(path)])
        first = next(line for line in ran.stdout.splitlines() if line.split()[:2] == ["fail", "config"])
        assert f"{path}: {shown}" in first
        assert first.count(str(path)) == 1


def test_quiet_shows_what_warns_or_fails_and_the_sums(tmp_path: Path) -> None:
    path = tmp_path / "kvreturn.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, "secret": ""}))
    ran = CliRunner().invoke(main, ["doctor", "--offline", "--quiet", "--config", str(path)])
    assert [line.split()[:2] for line in ran.stdout.splitlines()] == [["warn", "config.secret"], ["warn:", "2"]]


def test_a_seed_that_makes_hashes_known_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert doctor(tmp_path)[1]["config.hash_seed"][0][0] == "warn"


def test_without_node_files_nothing_is_known_of_flags(tmp_path: Path) -> None:
    assert doctor(tmp_path)[1]["flags"] == [
        ("skipped", "nothing is known of the nodes' flags", "give --node-config FILE for each node")
    ]


@pytest.mark.parametrize(
    ("says", "status", "finding"),
    [
        ("echo 'provider: efa'", "ok", "has EFA"),
        ("exit 61", "warn", "falls back to TCP"),
        (None, "skipped", "no fi_info"),
    ],
)
def test_where_efa_is_meant_this_machine_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str | None, status: str, finding: str
) -> None:
    if says:
        tool = tmp_path / "fi_info"
        tool.write_text(f"#!/bin/sh\n{says}\n")
        tool.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    efa = {"backends": ["LIBFABRIC"]}
    _, found = doctor(tmp_path, line(transfer(extra=efa)), line(transfer("kv_consumer", extra=efa)))
    ((is_status, is_finding, _),) = found["transport.efa"]
    assert is_status == status
    assert finding in is_finding


POD = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "spec": {
        "template": {
            "spec": {
                "containers": [
                    {"name": "sidecar", "args": ["--listen", ":80"]},
                    {
                        "name": "vllm",
                        "command": ["vllm", "serve"],
                        "args": ["m", "--block-size=64", "--kv-transfer-config", json.dumps(transfer())],
                        "env": [
                            {"name": "UCX_TLS", "value": "rc"},
                            {"name": "KVRETURN_SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                        ],
                    },
                ]
            }
        }
    },
}
SHELL = {"spec": {"containers": [{"command": ["/bin/sh", "-c"], "args": [
    f"exec vllm serve m --block-size 64 --kv-transfer-config '{json.dumps(transfer())}'"
]}]}}  # fmt: skip
COMPOSE = {
    "services": {"p": {"image": "x", "environment": {"UCX_TLS": "rc"}, "command": line(transfer(), "--block-size 64")}}
}
DOTTED = (
    "vllm serve m --block-size 64 --kv-transfer-config.kv_connector NixlConnector "
    f"--kv-transfer-config.kv_role kv_producer --kv-transfer-config.kv_connector_module_path {OURS} "
    "--kv-transfer-config.kv_connector_extra_config.bidirectional_kv_xfer true"
)


@pytest.mark.parametrize(
    ("text", "block_size", "ucx_tls"),
    [
        (json.dumps(transfer()), None, None),
        (yaml.safe_dump(POD), "64", "rc"),
        (yaml.safe_dump(SHELL), "64", None),
        (yaml.safe_dump(COMPOSE), "64", "rc"),
        (json.dumps(["vllm", "--block-size", "64", "--kv_transfer_config", json.dumps(transfer())]), "64", None),
        ("# the node\nUCX_TLS=rc \\\nvllm serve \\\n  --block-size 64 --kv-transfer-config '" + json.dumps(transfer())
         + "'", "64", "rc"),
        (DOTTED, "64", None),
    ],
    ids=["json", "deployment", "shell", "compose", "list", "script", "dotted"],
)  # fmt: skip
def test_a_node_is_found_however_it_is_written(
    tmp_path: Path, text: str, block_size: str | None, ucx_tls: str | None
) -> None:
    path = tmp_path / "node"
    path.write_text(text)
    (launch,) = read_launches(path)
    assert dict(launch.transfer) == transfer()
    assert launch.options.get("block-size") == block_size
    assert launch.environ.get("UCX_TLS") == ucx_tls


def test_several_nodes_of_one_file_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(yaml.safe_dump_all([POD, SHELL, {"kind": "Service"}]))
    assert [launch.source for launch in read_launches(path)] == [f"{path}#1", f"{path}#2"]


def test_the_json_form_has_the_members_of_the_docs(tmp_path: Path) -> None:
    ran, _ = doctor(tmp_path, P)
    report = json.loads(ran.stdout)
    members = {"schema", "kvreturn", "status", "config", "offline", "seconds", "counts", "findings"}
    assert (report["schema"], report.keys()) == (1, members)
    assert report["counts"].keys() == {"ok", "warn", "fail", "skipped"}
    assert sum(report["counts"].values()) == len(report["findings"])
    for finding in report["findings"]:
        assert finding.keys() == {"check", "status", "subject", "found", "remedy"}
        assert all(isinstance(value, str) for value in finding.values())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--node-config", "/no/such/file"), 2),
        (("--header", "nothing"), 2),
        (("--timeout", "0"), 2),
        (("--strict",), 1),
    ],
)
def test_exit_codes(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    path = tmp_path / "kvreturn.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, "secret": ""}))  # a warning
    ran = CliRunner().invoke(main, ["doctor", "--offline", "--config", str(path), *arguments])
    assert ran.exit_code == code
    assert CliRunner().invoke(main, ["doctor", "--offline", "--config", str(path)]).exit_code == 0


def test_our_own_keys_are_those_that_the_connector_reads() -> None:
    assert set(OWN_KEYS) == keys.OURS


_PIECES = [
    "vllm serve m ",
    "--kv-transfer-config ",
    "'",
    '"',
    "{",
    "}",
    "[",
    "]",
    ":",
    " ",
    "\n",
    "- ",
    "&a ",
    "*a",
    "--",
    ".",
    "=",
]
_PIECES += [
    "kv_connector",
    "args",
    "command",
    "env",
    "a",
    "1",
    "null",
    "\x00",
    "²",
    "--block-size ",
    "--- ",
    "NixlConnector",
]


@settings_of_tests(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(_PIECES), max_size=14).map("".join))
@example("&a {args: [vllm], x: *a}")
@example("{kv_connector: NixlConnector, 1: 2, kv_connector_extra_config: {3: 4, x: 5}}")
def test_no_file_breaks_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "node"
    path.write_text(text)
    flags, findings = read_files([path])
    assert findings
    assert list(agree(flags, None, "0.1.0"))
