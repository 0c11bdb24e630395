"""Limits, tenants and forms through real Envoy: who refuses, in which shape, and that nodes see nothing of it."""

import contextlib
import json

import aiohttp
import pytest

from kvreturn.core.fingerprint import SALT
from support.gateway import BODY_MODES, CHAT, scripted
from support.nodes import chat, decode_body, handle, replies

pytestmark = pytest.mark.parametrize("shipped", BODY_MODES)

D = replies(decode_body(params=handle()))
FORM = b'--x\r\ncontent-disposition: form-data; name="vllm_xargs"\r\n\r\n{"%s": 1}\r\n--x--\r\n'


async def test_large_headers_are_refused_by_the_router_and_still_larger_ones_by_envoy(shipped: str) -> None:
    async with scripted(shipped, D, limits={"header_bytes": 4_000}) as (there, p, d):
        assert (await there.post(CHAT, chat("Hi"), x_long="y" * 3_000)).status == 200
        p.seen.clear()
        d.seen.clear()
        refusal = await there.post(CHAT, chat("Hi"), x_long="y" * 4_001)
        assert refusal.status == 431
        assert json.loads(refusal.body)["error"]["type"] == "RequestHeaderFieldsTooLarge"
        with contextlib.suppress(aiohttp.ClientConnectionError):  # it closes before it has read all of them
            assert (await there.post(CHAT, chat("Hi"), x_long="y" * 9_000)).status == 431
        assert not p.seen + d.seen


async def test_a_form_that_hides_transfer_parameters_is_refused_and_another_one_passes(shipped: str) -> None:
    kind = "multipart/form-data; boundary=x"
    async with scripted(shipped, replies(b"{}")) as (there, _, d):
        for name, status in ((b"kv_transfer_params", 400), (b"kv\\u005ftransfer_params", 400), (b"language", 200)):
            answer = await there.post("/v1/audio/transcriptions", FORM % name, content_type=kind)
            assert answer.status == status
        assert [seen.body for seen in d.seen] == [FORM % b"language"]


async def test_a_session_of_two_tenants_under_one_id(shipped: str) -> None:
    settings = {"tenant_header": "x-tenant", "tenant_cache_salt": True, "secret": "s", "limits": {"min_tokens": 1}}
    async with scripted(shipped, D, **settings) as (there, p, d):
        assert (await there.post(CHAT, chat("Hi"))).status == 403
        assert not p.seen + d.seen
        for tenant in ("alice", "bob"):
            for talk in (["Hi"], ["Hi", "Good morning", "And?"]):
                answer = await there.post(CHAT, chat(*talk), x_tenant=tenant, x_session_id="s")
                assert answer.status == 200
                assert SALT.encode() not in answer.body
        assert await there.outcomes(5) == {"rejected": 1, "first_turn": 2, "hit": 2}
        salts = [json.loads(seen.body)["cache_salt"] for seen in (*p.seen, *d.seen)]
        assert len(set(salts[:4])) == 2
        assert salts[:4] == salts[4:]
