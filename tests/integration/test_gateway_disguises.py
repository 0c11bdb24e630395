"""A client's own transfer parameters, in many disguises and on all paths: no node sees them, through real Envoy."""

import gzip
import json
import zlib
from typing import Any
from urllib.parse import quote

import pytest

from support.envoy import raw
from support.gateway import BODY_MODES, CHAT, COMPLETIONS, scripted
from support.h2 import h2_request
from support.nodes import Seen, decode_body, replies

pytestmark = pytest.mark.parametrize("shipped", BODY_MODES)

MARK = "planted7f3"
PLANTED = {"do_remote_prefill": True, "remote_host": f"{MARK}.example", "remote_port": 1, "remote_block_ids": [[1]]}
BASE: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "prompt": "Hi",
    "input": "Hi",
}


def dumps(**members: Any) -> str:  # noqa: ANN401 - JSON
    return json.dumps({**BASE, **members})


PLAIN = dumps(kv_transfer_params=PLANTED)
BODIES: dict[str, bytes] = {
    "plain": PLAIN.encode(),
    "first": json.dumps({"kv_transfer_params": PLANTED, **BASE}).encode(),
    "twice": (PLAIN[:-1] + f', "kv_transfer_params": {json.dumps(PLANTED)}}}').encode(),
    "for the encoder cache": dumps(ec_transfer_params=PLANTED).encode(),
    "name with escapes": PLAIN.replace("kv_transfer_params", r"kv_transf\u0065r_params").encode(),
    "name all escapes": PLAIN.replace(
        "kv_transfer_params", "".join(f"\\u{ord(c):04X}" for c in "kv_transfer_params")
    ).encode(),
    "in vllm_xargs": dumps(vllm_xargs={"kv_transfer_params": PLANTED}).encode(),
    "in vllm_xargs, with escapes": dumps(vllm_xargs={"kv_transfer_params": PLANTED})
    .replace("params", r"p\u0061rams")
    .encode(),
    "in a container in a container": dumps(extra_body={"vllm_xargs": {"kv_transfer_params": PLANTED}}).encode(),
    "with a byte order mark": b"\xef\xbb\xbf" + PLAIN.encode(),
    "utf-16": PLAIN.encode("utf-16"),
    "utf-16, big end first, no mark": PLAIN.encode("utf-16-be"),
    "utf-32": PLAIN.encode("utf-32"),
    "white space around": b" \r\n\t" + PLAIN.encode() + b"\n\n",
    "no string": dumps(kv_transfer_params=MARK).encode(),
    "a list": dumps(kv_transfer_params=[PLANTED]).encode(),
}
PATHS = [
    *(CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize", "/inference/v1/generate"),
    *("/v1/chat%2Fcompletions", "/v1/%63hat/completions", "//v1/chat/completions", "/v1/./x/../completions"),
    *(f"{CHAT}/", f"{CHAT}?a=/v1/files", "/v1/completions%3Fx", "/v1/%2563hat/completions", "/V1/CHAT/COMPLETIONS"),
]
TYPES = ["application/json", "APPLICATION/JSON", "Application/Json;Charset=UTF-8", "application/vnd.api+json", "", None]


def answer(seen: Seen) -> Any:  # noqa: ANN401 - a handler
    """D and P answer whatever they are asked."""
    return replies()(seen) if b"do_remote_decode" in seen.body else replies(decode_body())(seen)


def planted(seen: Seen) -> bool:
    """Whether anything of the client's parameters is in a request."""
    texts = [seen.body, seen.request.raw_path.encode(), *(f"{k}: {v}".encode() for k, v in seen.headers.items())]
    texts += [seen.body.decode(c, "replace").encode() for c in ("utf-16", "utf-16-be", "utf-32")]
    return any(MARK.encode() in text for text in texts)


async def test_no_body_on_no_path_takes_them_to_a_node(shipped: str) -> None:
    seen_by_nodes = 0
    async with scripted(shipped, answer, answer) as (there, p, d):
        for path in PATHS:
            for name, body in BODIES.items():
                status = (await there.post(path, body)).status
                assert status in {200, 400}, (path, name)
                assert not [seen.path for seen in (*p.seen, *d.seen) if planted(seen)], (path, name)
                seen_by_nodes += len(d.seen)
                p.seen.clear()
                d.seen.clear()
    # Only what cannot be read as UTF-8 JSON was refused.
    assert seen_by_nodes == len(PATHS) * sum(not name.startswith(("utf-", "with a byte")) for name in BODIES)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses"])
async def test_no_content_type_takes_them_to_a_node(shipped: str, path: str) -> None:
    body = PLAIN
    async with scripted(shipped, answer, answer) as (there, p, d):
        for kind in TYPES:
            line = "" if kind is None else f"content-type: {kind}\r\n"
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{line}content-length: {len(body)}\r\n\r\n"
            status, _ = await raw(there.tap.address, head + body)
            assert status == 200, kind
        assert len(d.seen) == len(TYPES)
        assert not [seen for seen in (*p.seen, *d.seen) if planted(seen)]


@pytest.mark.parametrize("white", ["", " ", "\t"])
async def test_no_white_space_around_a_content_type_takes_them_to_a_node(shipped: str, white: str) -> None:
    """HTTP/2 lets it pass, and HTTP/1, which nodes speak, cuts it off."""
    bodies = {
        "": (PLAIN.encode(), 200),
        "application/json": (PLAIN.encode(), 200),
        "application/x-www-form-urlencoded": (f"vllm_xargs={quote(PLAIN)}".encode(), 400),
    }
    async with scripted(shipped, answer, answer) as (there, _, d):
        for kind, (body, status) in bodies.items():
            headers = {":method": "POST", ":scheme": "http", ":authority": "x", ":path": "/v1/embeddings"}
            got = await h2_request(there.tap.address, {**headers, "content-type": f"{white}{kind}{white}"}, body)
            assert got.status == status, kind
        assert len(d.seen) == 2
        assert not [seen for seen in d.seen if planted(seen)]


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
async def test_no_method_takes_them_to_a_node(shipped: str, method: str) -> None:
    async with scripted(shipped, answer, answer) as (there, p, d):
        assert (await there.request(method, CHAT, PLAIN.encode())).status == 200
        assert (len(d.seen), p.seen, planted(d.seen[0])) == (1, [], False)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses"])
async def test_compressed_bodies_are_refused_since_we_cannot_look_into_them(shipped: str, path: str) -> None:
    compressed = {"gzip": gzip.compress(PLAIN.encode()), "deflate": zlib.compress(PLAIN.encode()), "br": b"\x0b\x02"}
    async with scripted(shipped, answer, answer) as (there, p, d):
        for encoding, body in compressed.items():
            refusal = await there.post(path, body, content_encoding=encoding)
            assert refusal.status == 415
            assert json.loads(refusal.body)["error"]["type"] == "UnsupportedMediaType"
            assert refusal.headers["accept-encoding"] == "identity"
        assert not p.seen + d.seen


async def test_no_header_steers_the_routing_or_reaches_a_node(shipped: str) -> None:
    headers = {
        "x_kvreturn_node": f"{MARK}:1",
        "X_KVReturn_Upstream": MARK,
        "x_prefiller_host_port": f"{MARK}:2",
        "x_gateway_destination_endpoint": f"{MARK}:3",
        "x_data_parallel_rank": MARK,
        "x_session_token": MARK,
        "x_encoder_hosts_ports": f"{MARK}:4",
        "x_kv_cache_source_host_port": f"{MARK}:5",
        "x_dynamo_worker_instance_id": MARK,
        "x_smg_target_worker": MARK,
        "target_pod": f"{MARK}:6",
        "routing_strategy": MARK,
    }
    async with scripted(shipped, answer, answer) as (there, p, d):
        for path in (CHAT, "/v1/responses", "/v1/files"):
            assert (await there.post(path, dumps().encode(), **headers)).status == 200
        assert (len(p.seen), len(d.seen)) == (2, 3)
        assert not [seen for seen in (*p.seen, *d.seen) if planted(seen)]
