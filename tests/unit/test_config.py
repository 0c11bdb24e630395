import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from kvreturn.config import ConfigError, Settings
from kvreturn.config_file import load_settings

SMALLEST = {"pools": {"prefill": ["10.0.0.1:8000"], "decode": ["10.1.0.1:8000"]}}


def load(tmp_path: Path, text: str, **environ: str) -> Settings:
    path = tmp_path / "kvreturn.yaml"
    path.write_text(text)
    return load_settings(path, environ)


def errors(tmp_path: Path, text: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as info:
        load(tmp_path, text, **environ)
    return str(info.value).replace(str(tmp_path / "kvreturn.yaml"), "FILE").splitlines()


POOLS = """\
pools:
  prefill: [10.0.0.1:8000]
  decode: ["[fd00::1]:8000", vllm-d.svc:8000]
"""


def test_the_smallest_file_is_enough(tmp_path: Path) -> None:
    settings = load(tmp_path, POOLS)
    assert settings.pools.decode == ["[fd00::1]:8000", "vllm-d.svc:8000"]
    assert (settings.listen, settings.admin, settings.proof) == ("127.0.0.1:9090", "127.0.0.1:9091", "connector")
    assert (settings.store.ttl, settings.store.deadline) == (450.0, 0.02)  # upstream's TTL, and design rule 4
    assert (settings.limits.min_tokens, settings.limits.event_bytes) == (64, 4 << 20)  # vLLM's threshold
    assert (settings.prefill.via, settings.prefill.on_failure) == ("envoy", "fallback")
    assert (settings.envoy.request_body_mode, settings.envoy.response_body_mode) == ("BUFFERED", "STREAMED")


def test_everything_can_be_set(tmp_path: Path) -> None:
    text = (
        POOLS
        + """\
listen: unix:/run/kvreturn.sock
admin: null
prefill: {via: direct, timeout: 2.5, on_failure: error}
store: {ttl: 60, max_entries: 5, max_bytes: 1000, deadline: 0.5}
proof: "off"
models:
  a: {proof: trusted}
  b: {}
secret: s3cret
tenant_header: X-Tenant
limits: {request_bytes: 1, event_bytes: 2, response_bytes: 3, min_tokens: 0}
breaker: {failures: 1, window: 2}
drain_timeout: 1
envoy: {listen: "0.0.0.0:80", admin: "127.0.0.1:1"}
"""
    )
    settings = load(tmp_path, text)
    assert settings.listen == "unix:/run/kvreturn.sock"
    assert settings.admin is None
    assert settings.secret.get_secret_value() == "s3cret"
    assert settings.tenant_header == "X-Tenant"
    assert [settings.proof_for(m) for m in ("a", "b", "c", "")] == ["trusted", "off", "off", "off"]


def test_the_secret_of_the_environment_comes_first(tmp_path: Path) -> None:
    assert load(tmp_path, POOLS, KVRETURN_SECRET="env").secret.get_secret_value() == "env"
    assert load(tmp_path, POOLS + "secret: file\n", KVRETURN_SECRET="env").secret.get_secret_value() == "env"
    assert load(tmp_path, POOLS + "secret: file\n", KVRETURN_SECRET="").secret.get_secret_value() == "file"
    assert load(tmp_path, POOLS).secret.get_secret_value() == ""


def test_the_secret_is_never_printed(tmp_path: Path) -> None:
    settings = load(tmp_path, POOLS + "secret: s3cret\n")
    assert "s3cret" not in repr(settings) + str(settings) + settings.model_dump_json()
    for text in ("secret: [s3cret]\n", "secret: {s3cret: 1}\n", "secrets: s3cret\n", "secret: 12345678\n"):
        message = "\n".join(errors(tmp_path, POOLS + text))
        assert "s3cret" not in message
        assert "12345678" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "pools:\n  prefill: [a:1]\n  decod: [b:1]\n",
            ["FILE:1: pools.decode: Field required", "FILE:3: pools.decod: unknown setting; did you mean `decode`?"],
        ),
        (POOLS + "lisen: a:1\n", ["FILE:4: lisen: unknown setting; did you mean `listen`?"]),
        (
            POOLS + "\n# a comment\nstore:\n  ttl: 5\n  max_entrys: 5\n",
            ["FILE:8: store.max_entrys: unknown setting; did you mean `max_entries`?"],
        ),
        (POOLS + "zzz: 1\n", ["FILE:4: zzz: unknown setting"]),
        (POOLS + "models:\n  m:\n    prof: off\n", ["FILE:6: models.m.prof: unknown setting; did you mean `proof`?"]),
        (
            POOLS + "models:\n  store:\n    prof: off\n",
            ["FILE:6: models.store.prof: unknown setting; did you mean `proof`?"],
        ),
        (POOLS + "models:\n  envoy:\n    tl: 1\n", ["FILE:6: models.envoy.tl: unknown setting"]),
        (POOLS + "store: {ttl: 0}\n", ["FILE:4: store.ttl: Input should be greater than 0"]),
        (
            POOLS + "store:\n  ttl: soon\n",
            ["FILE:5: store.ttl: Input should be a valid number, unable to parse string as a number"],
        ),
        (
            POOLS + "limits: {min_tokens: -1}\n",
            ["FILE:4: limits.min_tokens: Input should be greater than or equal to 0"],
        ),
        (
            POOLS + "limits: {request_bytes: 1.5}\n",
            ["FILE:4: limits.request_bytes: Input should be a valid integer, got a number with a fractional part"],
        ),
        (POOLS + "proof: maybe\n", ["FILE:4: proof: Input should be 'connector', 'router', 'trusted' or 'off'"]),
        (
            "pools:\n  prefill: []\n  decode: [b:1]\n",
            ["FILE:2: pools.prefill: List should have at least 1 item after validation, not 0"],
        ),
        ("{}\n", ["FILE:1: pools: Field required"]),
        ("store: {ttl: 5}\n", ["FILE:1: pools: Field required"]),
    ],
)
def test_every_problem_has_its_line_and_says_what_is_wrong(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert errors(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("10.0.0.1", "'10.0.0.1' is no host:port"),
        ("fd00::1:80", "write an IPv6 address as [address]:port"),
        ("host:99999", "'host:99999' is no host:port"),
        ("http://host:80", "'http://host:80'"),
    ],
)
def test_addresses_are_checked_one_by_one(tmp_path: Path, address: str, message: str) -> None:
    text = f"pools:\n  prefill:\n    - a:1\n    - '{address}'\n  decode: [b:1]\n"
    (line,) = errors(tmp_path, text)
    assert line.startswith("FILE:4: pools.prefill.1: ")
    assert message in line


def test_a_socket_needs_an_absolute_path(tmp_path: Path) -> None:
    assert load(tmp_path, POOLS + "listen: unix:/x\n").listen == "unix:/x"
    for listen in ("unix:x", "unix:", "/x"):
        (line,) = errors(tmp_path, POOLS + f"listen: {listen!r}\n")
        assert line.startswith("FILE:4: listen: ")


@pytest.mark.parametrize("value", [".inf", ".nan", "-.inf", "-1", "0"])
@pytest.mark.parametrize(
    "name",
    [
        "store: {ttl: %s}",
        "store: {deadline: %s}",
        "prefill: {timeout: %s}",
        "breaker: {window: %s}",
        "drain_timeout: %s",
    ],
)
def test_a_time_is_a_positive_number_of_seconds(tmp_path: Path, name: str, value: str) -> None:
    (line,) = errors(tmp_path, POOLS + name % value + "\n")
    assert line.startswith("FILE:4: ")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("admin: 127.0.0.1:8090\n", "4: calls and admin: both are 127.0.0.1:8090"),
        ("calls: 127.0.0.1:9090\n", "4: listen and calls: both are 127.0.0.1:9090"),
        ("envoy: {admin: 127.0.0.1:8090}\n", "4: calls and envoy.admin: both are 127.0.0.1:8090"),
        ("listen: unix:/r\ncalls: unix:/r\n", "5: listen and calls: both are unix:/r"),
        (
            "workers: 2\nsecret: s\nstore: {url: 'redis://a'}\nadmin: 127.0.0.1:8092\n",
            "7: admin and calls of worker 1: both are 127.0.0.1:8092",
        ),
        ("admin: 127.0.0.1:9090\n", "4: listen and admin: both are 127.0.0.1:9090"),
        ("listen: 127.0.0.1:9091\n", "4: listen and admin: both are 127.0.0.1:9091"),
        ("proof: connector\nenvoy: {listen: 127.0.0.1:9090}\n", "5: listen and envoy.listen: both are 127.0.0.1:9090"),
        (
            "envoy:\n  listen: 127.0.0.1:5\n  prefill_listen: 127.0.0.1:5\n",
            "6: envoy.listen and envoy.prefill_listen: both are 127.0.0.1:5",
        ),
        ("envoy: {admin: 127.0.0.1:8000}\n", "4: envoy.listen and envoy.admin: both are 127.0.0.1:8000"),
        (
            "envoy: {orchestrated: {decode_listen: '127.0.0.1:9090'}}\n",
            "4: listen and envoy.orchestrated.decode_listen: both are 127.0.0.1:9090",
        ),
        (
            "workers: 3\nsecret: s\nstore: {url: 'redis://a'}\nenvoy: {admin: 127.0.0.1:9095}\n",
            "7: admin of worker 2 and envoy.admin: both are 127.0.0.1:9095",
        ),
        (
            "envoy:\n  admin: 127.0.0.1:8003\n  orchestrated: {}\n",
            "6: envoy.orchestrated.decode_listen and envoy.admin: both are 127.0.0.1:8003",
        ),
    ],
)
def test_no_two_servers_share_an_address(tmp_path: Path, text: str, told: str) -> None:
    unset = "calls" in told and "\ncalls:" not in f"\n{text}"
    hint = " (`calls`, if unset, goes by `listen`)" if unset else ""
    assert errors(tmp_path, POOLS + text) == [f"FILE:{told}; give each its own{hint}"]


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("", "127.0.0.1:8090"),
        ("listen: '[::1]:9190'\n", "[::1]:8190"),
        ("listen: 127.0.0.1:100\nadmin: null\n", "127.0.0.1:1100"),  # there is no port -900
        ("listen: unix:/run/k.sock\n", "unix:/run/k.sock.calls"),
        ("calls: 0.0.0.0:7\n", "0.0.0.0:7"),
        ("listen: unix:/run/k.sock\ncalls: unix:/run/c.sock\n", "unix:/run/c.sock"),
        ("calls: 127.0.0.1:8880\nenvoy: {routers: ['10.0.0.9:9090']}\n", "127.0.0.1:8880"),
        ("listen: unix:/k\nenvoy: {routers: ['unix:/k', 'unix:/l']}\n", "unix:/k.calls"),
    ],
)
def test_a_router_is_called_1000_ports_below_its_listen_unless_the_settings_say_where(
    tmp_path: Path, text: str, there: str
) -> None:
    settings = load(tmp_path, POOLS + text)
    assert settings.calls_listen == settings.worker(0).calls_listen == settings.listens()["calls"] == there


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("", ["10.0.0.8:8090", "10.0.0.9:8091"]),
        ("calls: 127.0.0.1:9590\n", ["10.0.0.8:9590", "10.0.0.9:9591"]),
        ("listen: 10.0.0.9:9091\nadmin: null\ncalls: 10.0.0.9:9081\n", ["10.0.0.8:9080", "10.0.0.9:9081"]),
    ],
)
def test_other_routers_are_called_as_far_from_their_listen(tmp_path: Path, text: str, there: list[str]) -> None:
    routers = ["10.0.0.8:9090", "10.0.0.9:9091"]
    settings = load(tmp_path, POOLS + text + f"envoy: {{routers: {routers}}}\n")
    assert [settings.calls_of(r) for r in routers] == there


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("calls: unix:/c\n", 4, "calls: unix:/c: it must be a port if `listen` is one, and a Unix socket if that is"),
        ("listen: unix:/k\ncalls: 127.0.0.1:5\n", 5, "calls: 127.0.0.1:5: it must be a port if"),
        ("calls: 127.0.0.1\n", 4, "calls: '127.0.0.1' is no host:port"),
        (
            "calls: 127.0.0.1:65000\nenvoy: {routers: ['10.0.0.9:60000']}\n",
            5,
            "calls, envoy.routers: there is no port 55910 from 10.0.0.9:60000; choose another one",
        ),
        (
            "envoy: {routers: ['127.0.0.1:10090', '127.0.0.1:9090']}\n",
            4,
            "calls, envoy.routers: 127.0.0.1:9090 is where one router listens and another one is called; choose ",
        ),
        (
            "listen: unix:/k\ncalls: unix:/c\nenvoy: {routers: ['unix:/k', 'unix:/l']}\n",
            5,
            "calls: unix:/c: with envoy.routers, which have theirs as far from their `listen`, Envoy looks for it at ",
        ),
        (
            "listen: 0.0.0.0:9090\ncalls: 127.0.0.1:8090\nenvoy: {routers: ['10.0.0.9:9090']}\n",
            5,
            "calls: 127.0.0.1:8090: with envoy.routers, which have theirs as far from their `listen`, Envoy looks for ",
        ),
    ],
)
def test_where_a_router_cannot_be_called_is_told(tmp_path: Path, text: str, line: int, told: str) -> None:
    (error,) = errors(tmp_path, POOLS + text)
    assert error.startswith(f"FILE:{line}: {told}")


SHARED = "secret: s\nstore: {url: 'redis://a'}\n"


def test_workers_need_a_store_that_they_share(tmp_path: Path) -> None:
    (line,) = errors(tmp_path, POOLS + "proof: connector\nworkers: 2\n")
    assert line.startswith("FILE:5: workers: 2 processes need a session store that they share.")
    assert line.endswith("Set `store.url` to a Redis or Valkey, or `workers: 1`")
    assert load(tmp_path, POOLS + "workers: 1\n").workers == 1


@pytest.mark.parametrize(
    ("text", "listens", "admins"),
    [
        (
            "",
            ["127.0.0.1:9090", "127.0.0.1:9092", "127.0.0.1:9094"],
            ["127.0.0.1:9091", "127.0.0.1:9093", "127.0.0.1:9095"],
        ),
        ("listen: '[::1]:5'\nadmin: null\n", ["[::1]:5", "[::1]:7", "[::1]:9"], [None] * 3),
        (
            "listen: unix:/run/k.sock\nadmin: 'a:1'\n",
            [f"unix:/run/k.sock{i}" for i in ("", ".1", ".2")],
            ["a:1", "a:3", "a:5"],
        ),
    ],
)
def test_each_worker_has_its_own_addresses(
    tmp_path: Path, text: str, listens: list[str], admins: list[str | None]
) -> None:
    settings = load(tmp_path, POOLS + SHARED + "workers: 3\n" + text)
    workers = [settings.worker(i) for i in range(3)]
    assert [w.listen for w in workers] == listens == settings.router_listens()
    assert [w.admin for w in workers] == admins
    assert [w.calls_listen for w in workers] == [settings.calls_of(listen) for listen in listens]


def test_workers_are_called_two_ports_apart(tmp_path: Path) -> None:
    settings = load(tmp_path, POOLS + SHARED + "workers: 3\ncalls: 127.0.0.1:7000\n")
    assert [settings.worker(i).calls_listen for i in range(3)] == [f"127.0.0.1:{port}" for port in (7000, 7002, 7004)]
    unset = load(tmp_path, POOLS + SHARED + "workers: 2\nlisten: unix:/k\n")
    assert [unset.worker(i).calls_listen for i in range(2)] == ["unix:/k.calls", "unix:/k.1.calls"]


def test_a_port_for_each_worker_must_exist(tmp_path: Path) -> None:
    (line,) = errors(tmp_path, POOLS + SHARED + "listen: 127.0.0.1:65532\nworkers: 3\n")
    assert line == "FILE:7: workers: from 127.0.0.1:65532 on there is no port for worker 2; choose a lower one"


def test_the_command_line_stands_above_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kvreturn.yaml"
    path.write_text(POOLS + SHARED + "workers: 1\n")
    assert load_settings(path, {}, {"workers": 4}).workers == 4


def test_two_switched_off_servers_are_not_two_of_one_address(tmp_path: Path) -> None:
    assert load(tmp_path, POOLS + "admin: null\nenvoy: {listen: '0.0.0.0:8000'}\n").admin is None


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n", "text\n", "5\n", "null\n"])
def test_a_file_that_holds_no_mapping(tmp_path: Path, text: str) -> None:
    assert errors(tmp_path, text) == ["FILE: the file must hold one mapping; see the README for the smallest one"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        *(("a: [1\n", ":2"), ("a: 'x\n", ":2"), ("\t a: 1\n", ":1"), ("a: 1\n--- \nb: 2\n", ":2")),
        *(("a: !!python/name:os.system\n", ":1"), ("a: 1\nb: &x [*y]\n", ":2")),
        *(("a: 2026-13-45\n", ""), ("a: " + "9" * 5000, ""), ("a: &x [*x]\n", ""), ("a: " + "[" * 5000, ":1")),
    ],
    ids=range(10),
)
def test_a_file_that_is_no_yaml(tmp_path: Path, text: str, line: str) -> None:
    (told,) = errors(tmp_path, text)
    assert told.startswith(f"FILE{line}: not YAML: ")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "kvreturn.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not YAML"):
        load_settings(path, {})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        load_settings(tmp_path / "absent.yaml", {})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_settings(tmp_path, {})


@pytest.mark.parametrize("text", ["1: 2\n", "true: 2\n", "null: 2\n", "2026-01-01: 2\n", "[a]: 2\n"])
def test_names_that_are_no_text_are_errors_too(tmp_path: Path, text: str) -> None:
    assert errors(tmp_path, POOLS + text)[0].startswith("FILE")


def test_settings_do_not_change() -> None:
    settings = Settings.model_validate(SMALLEST)
    with pytest.raises(ValidationError):
        settings.store.ttl = 5  # type: ignore[misc]


def models(model: type[BaseModel]) -> list[type[BaseModel]]:
    nested = [f.annotation for f in model.model_fields.values() if isinstance(f.annotation, type)]
    return [model, *(m for n in nested if issubclass(n, BaseModel) for m in models(n))]


@pytest.mark.parametrize("model", models(Settings))
def test_every_setting_is_described(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        assert field.description or nested, name


def test_the_defaults_are_settings_that_a_file_may_hold(tmp_path: Path) -> None:
    defaults: dict[str, Any] = json.loads(Settings.model_validate(SMALLEST).model_dump_json(by_alias=True))
    assert load(tmp_path, yaml.safe_dump(defaults | {"secret": ""})) == Settings.model_validate(SMALLEST)
    assert all(math.isfinite(v) for v in defaults["store"].values() if isinstance(v, float))


@pytest.mark.parametrize("text", ["proof: off\n", "models: {m: {proof: off}}\n"])
def test_a_bare_off_is_the_level_and_not_yamls_false(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, POOLS + text).proof_for("m") == "off"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("proof: off\nproof: trusted\n", 5),
        ("store:\n  ttl: 1\n  ttl: 2\n", 6),
        ("models: {a: {proof: off, proof: off}}\n", 4),
    ],
)
def test_a_setting_that_is_given_twice_is_no_setting(tmp_path: Path, text: str, line: int) -> None:
    (error,) = errors(tmp_path, POOLS + text)
    assert error.startswith(f"FILE:{line}: ")
    assert error.endswith(": given twice")


def test_a_shared_store_by_file_or_by_environment(tmp_path: Path) -> None:
    url = "redis://kv:hunter2@10.0.0.9:6379/0"
    text = POOLS + "secret: s3cret\nstore:\n  ttl: 60\n"
    by_file = load(tmp_path, text + f"  url: {url}\n  encryption_key: sesame-of-32-bytes\n")
    by_environment = load(tmp_path, text, KVRETURN_STORE_URL=url, KVRETURN_STORE_ENCRYPTION_KEY="sesame-of-32-bytes")
    assert by_file == by_environment
    assert by_file.store.url
    assert by_file.store.url.get_secret_value() == url
    assert load(tmp_path, POOLS, KVRETURN_STORE_URL=url, KVRETURN_SECRET="s").store.ttl == 450.0
    told = repr(by_file) + str(by_file) + by_file.model_dump_json()
    assert not any(word in told for word in ("hunter2", "10.0.0.9", "sesame"))


def test_a_shared_store_without_a_secret_is_refused(tmp_path: Path) -> None:
    (line,) = errors(tmp_path, POOLS + "store:\n  url: redis://h\n")
    assert "store.url needs `secret` (or $KVRETURN_SECRET), the same on all routers" in line


@pytest.mark.parametrize("environ", [{}, {"KVRETURN_STORE_URL": "redis://u:hunter2@a,b"}])
def test_a_wrong_store_url_has_its_line_and_tells_no_password(tmp_path: Path, environ: dict[str, str]) -> None:
    text = POOLS + "secret: s\nstore:\n  ttl: 5\n  url: redis://u:hunter2@a,b\n"
    (line,) = errors(tmp_path, text, **environ)
    assert line.startswith("FILE:7: store.url: ")
    assert "several hosts need redis+sentinel:// or redis+cluster://" in line
    assert "hunter2" not in line


@pytest.mark.parametrize("store", ["store: null\n", "store: [1]\n", "store: x\n"])
def test_a_store_that_is_no_mapping_is_refused_whatever_the_environment_says(tmp_path: Path, store: str) -> None:
    (line,) = errors(tmp_path, POOLS + "secret: s\n" + store, KVRETURN_STORE_URL="redis://h")
    assert line.startswith("FILE:5: store: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{dns: 'http://x:1'}", ["FILE:3: pools.decode.dns: 'http://x:1': write host:port, without a scheme"]),
        (
            "\n    dns: x:1\n    intervall: 5",
            ["FILE:5: pools.decode.intervall: unknown setting; did you mean `interval`?"],
        ),
        ("{dns: x:1, ranks: 0}", ["FILE:3: pools.decode.ranks: Input should be greater than 0"]),
        (
            "{}",
            ["FILE:3: pools.decode: give one of `static`, `dns` and `endpoint_slices`, or just a list of `host:port`"],
        ),
        (
            "\n    endpoint_slices:\n      service: s",
            ["FILE:4: pools.decode.endpoint_slices.port: Field required"],
        ),
        (
            "\n    endpoint_slices:\n      servic: s\n      port: 1",
            [
                "FILE:4: pools.decode.endpoint_slices.service: Field required",
                "FILE:5: pools.decode.endpoint_slices.servic: unknown setting; did you mean `service`?",
            ],
        ),
        ("5", ["FILE:3: pools.decode: Input should be a valid list"]),
    ],
)
def test_a_wrong_pool_is_named_by_its_line(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert errors(tmp_path, f"pools:\n  prefill: [a:1]\n  decode: {text}\n") == expected


def test_envoy_cannot_ask_kubernetes(tmp_path: Path) -> None:
    text = "pools: {prefill: [a:1], decode: {endpoint_slices: {service: s, port: 1}}}\nenvoy: {endpoints: bootstrap}\n"
    (line,) = errors(tmp_path, text)
    assert line.startswith("FILE:2: envoy.endpoints: bootstrap does not go with pools.decode.endpoint_slices, ")
