import json
from typing import Any

import pytest

from kvreturn.core.jsontext import JSONTextError, ObjectText
from kvreturn.core.scrub import foreign_headers, may_hold_params, scrub_body

EVIL = '{"remote_host":"evil"}'
CONTAINERS = ["vllm_xargs", "extra_args", "sampling_params", "extra_body", "metadata"]


def scrub(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return scrub_body(ObjectText(raw)).text


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_fr85_transfer_parameters_go_at_the_top_level(name: str) -> None:
    assert scrub(f'{{"model": "m", "{name}": {EVIL}}}') == b'{"model": "m"}'
    assert scrub(f'{{"{name}":{EVIL},"{name}":null}}') == b"{}"


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_fr85_transfer_parameters_go_from_containers_at_any_depth(container: str, name: str) -> None:
    forms = [
        f'{{"{name}":{EVIL}}}',
        f'{{"a":1,"{name}":{EVIL},"b":2}}',
        f'{{"extra_args":{{"{name}":{EVIL}}}}}',
        f'{{"a":[1,[{{"{name}":{EVIL}}}]]}}',
        f'[{{"{name}":{EVIL}}}]',
    ]
    for form in forms:
        out = scrub(f'{{"{container}":{form},"n":1}}')
        assert b"evil" not in out
        assert name.encode() not in out
        assert json.loads(out)["n"] == 1


@pytest.mark.parametrize(
    "spelling", ["kv_transfer\\u005fparams", "\\u006bv_transfer_params", "kv_transfer_param\\u0073"]
)
def test_fr85_escapes_do_not_hide_a_name(spelling: str) -> None:
    assert b"evil" not in scrub(f'{{"{spelling}":{EVIL}}}')
    assert b"evil" not in scrub(f'{{"vllm_xargs":{{"{spelling}":{EVIL}}}}}')
    assert b"evil" not in scrub(f'{{"vllm\\u005fxargs":{{"kv_transfer_params":{EVIL}}}}}')


@pytest.mark.parametrize("container", CONTAINERS)
def test_fr85_a_second_container_of_the_same_name_hides_nothing(container: str) -> None:
    evil, good = f'{{"kv_transfer_params":{EVIL}}}', '{"a":1}'
    for first, second in [(evil, good), (good, evil), (evil, evil)]:
        out = scrub(f'{{"{container}":{first},"{container}":{second}}}')
        assert b"evil" not in out


def test_all_else_stays_byte_for_byte() -> None:
    clean = b'{ "model":"m",\t"messages":[{"content":"\\u00e9 kv_transfer_params \\u2028"}], "x":1.50, "x":2 }\r\n'
    assert scrub(clean) == clean
    metadata = b'{"metadata":{"note": "\\u006bv_transfer_params", "n":1.50}}'
    assert scrub(metadata) == metadata
    messages = b'[ {"role":"user", "content":"\\"kv_transfer_params\\":{}"} ]'
    mixed = b'{"metadata":{"kv_transfer_params":1,"k": 1},"messages":%b,"kv_transfer_params":2 , "n":1e2}' % messages
    assert scrub(mixed) == b'{"metadata":{"k":1},"messages":%b , "n":1e2}' % messages


def test_what_the_prompt_is_made_of_is_never_touched() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"kv_transfer_params": {"type": "object"}}}}
    body = json.dumps(
        {"messages": [{"role": "user", "content": "x", "kv_transfer_params": 1}], "tools": [tool]}
    ).encode()
    assert scrub(body) == body


@pytest.mark.parametrize(
    "value",
    ['{"kv_transfer_params":1,"a":"\\ud800"}', '{"kv_transfer_params":1,"a":NaN}', '{"kv_transfer_params":1,"a":-0.0}'],
)
def test_odd_values_beside_them_do_not_get_in_the_way(value: str) -> None:
    scrubbed = json.loads(scrub(f'{{"metadata":{value}}}'))
    assert list(scrubbed["metadata"]) == ["a"]


@pytest.mark.parametrize("depth", [400, 495, 600, 900, 980, 5000])
def test_a_container_that_is_too_deep_to_look_into_is_refused(depth: int) -> None:
    body = b'{"metadata":' + b"[" * depth + b'{"kv_transfer_params":1}' + b"]" * depth + b"}"
    try:
        assert b"kv_transfer_params" not in scrub(body)
    except JSONTextError as e:
        assert "nested too deeply" in str(e)  # noqa: PT017 - either is right, depending on the interpreter's limit


# --- headers ---


def test_fr88_only_routers_may_set_routing_headers() -> None:
    foreign = [
        "x-kvreturn-decode-node",
        "x-kvreturn-",
        "x-prefiller-host-port",
        "x-prefiller-url",
        "x-data-parallel-host-port",
        "x-gateway-destination-endpoint",
        "x-gateway-destination-endpoint-subset",
        "x-gateway-destination-endpoint-served",
        "x-session-token",
        "x-data-parallel-rank",
        "x-encoder-hosts-ports",
        "x-kv-cache-source-host-port",
        "x-llm-d-reserved-host-port",
        "x-llm-d-model-name-rewrite",
        "x-gateway-model-name-rewrite",
        "x-worker-instance-id",
        "x-prefill-instance-id",
        "x-dp-rank",
        "x-prefill-dp-rank",
        "x-enable-local-updates",
        "x-dynamo-prefill-instance-id",
        "x-dynamo-token-data",
        "x-smg-target-worker",
        "x-sglang-routing-key",
        "target-pod",
        "target-cluster",
        "routing-strategy",
        "external-filter",
        "x-went-into-req-headers",
    ]
    own = ["host", ":path", "authorization", "x-request-id", "x-kvreturn", "x-session-id", "traceparent"]
    assert foreign_headers([*own, *foreign, *foreign]) == sorted(foreign)
    assert foreign_headers(own) == []


# --- the quick look ---


@pytest.mark.parametrize(
    ("body", "may"),
    [
        (b'{"kv_transfer_params":1}', True),
        (b'{"vllm_xargs":{"ec_transfer_params":1}}', True),
        (b'{"kv\\u005ftransfer\\u005fparams":1}', True),
        (b'{"model":"m","input":"plain text"}', False),
        (b"", False),
    ],
)
def test_the_quick_look(body: bytes, may: bool) -> None:  # noqa: FBT001
    assert may_hold_params(body) is may


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
def test_the_quick_look_knows_all_encodings_that_a_node_would_read(encoding: str) -> None:
    text: Any = f'{{"kv_transfer_params":{EVIL}}}'.encode(encoding)
    assert json.loads(text)["kv_transfer_params"]["remote_host"] == "evil"  # Python's json, so vLLM's server too
    assert may_hold_params(text)
    if encoding != "utf-8":
        with pytest.raises(JSONTextError):
            scrub(text)
