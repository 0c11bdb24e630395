"""Roles `prefill` and `decode`: the two legs of a turn as an orchestrator sends them, each in a stream of its own."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from support.extproc import ALL_MODES, Envoy, Mode, Modes, Request, Response
from support.harness import DECODE, Harness, harness
from support.nodes import (
    COLD,
    answer,
    carried_handle,
    chat,
    connector,
    decode_body,
    decode_events,
    handle,
    prefill_body,
    prefill_params,
    report,
    sent_params,
)
from support.turns import d_handle

PREFILL = "10.0.0.3:8100"
FIRST, NEXT = ["Hi"], ["Hi", "Good morning", "And?"]
JSON = {"content-type": "application/json"}


@dataclass
class Proxy:
    """Sends both legs as vLLM's `toy_proxy_server.py` does: the same prompt, P's parameters to D.

    Attributes:
        router: with the roles.
        modes: of both filters.
        headers: of both legs.
    """

    router: Harness = field(default_factory=harness)
    modes: Modes = field(default_factory=Modes)
    headers: Mapping[str, str] = field(default_factory=lambda: {**JSON, "x-request-id": "one id", "x-dp-rank": "1"})
    turns: int = 0

    async def prefill(
        self,
        contents: Sequence[str],
        params: Any = COLD,  # noqa: ANN401 - JSON
        response: Response | None = None,
        **members: Any,  # noqa: ANN401 - JSON
    ) -> Envoy:
        body = chat(*contents, **members, stream=False, max_tokens=1, kv_transfer_params=params)
        return await self.play("prefill", body, response or self.processed)

    def processed(self, upstream: Any) -> Response:  # noqa: ANN401 - what went to P
        """P with our connector."""
        self.turns += 1
        body = json.loads(connector(upstream.body).body)
        body["kv_transfer_params"]["remote_request_id"] = f"chatcmpl-{self.turns}"
        return Response([json.dumps(body).encode()], headers=JSON, node=PREFILL)

    async def decode(self, contents: Sequence[str], params: Any, **members: Any) -> Envoy:  # noqa: ANN401 - JSON
        body = chat(*contents, **members, stream=True, kv_transfer_params=params)
        return await self.play("decode", body, Response(decode_events(params=handle()), node=DECODE))

    async def play(self, role: str, body: bytes, response: Any, path: str = "/v1/chat/completions") -> Envoy:  # noqa: ANN401
        envoy = self.router.envoy(self.modes, role)
        await envoy.play(Request(path, [body], headers=self.headers), response)
        assert not self.router.service.running
        return envoy

    async def turn(self, contents: Sequence[str], **members: Any) -> Envoy:  # noqa: ANN401 - JSON
        """Both legs. Returns that of P."""
        p = await self.prefill(contents, **members)
        await self.decode(contents, sent_params(p.client.body), **members)
        return p


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_what_the_decode_leg_leaves_goes_with_the_next_prefill_leg_and_all_else_stays(modes: Modes) -> None:
    proxy = Proxy(modes=modes)
    router = proxy.router
    p = await proxy.prefill(FIRST)
    assert p.upstream.body == chat(*FIRST, stream=False, max_tokens=1, kv_transfer_params=COLD)
    told = sent_params(p.client.body)
    assert told == prefill_params(remote_request_id="chatcmpl-1")
    d = await proxy.decode(FIRST, told)
    assert d.upstream.body == chat(*FIRST, stream=True, kv_transfer_params=told)
    assert d.client.body == b"".join(decode_events())
    assert router.handles == 1
    p = await proxy.prefill(NEXT, {**COLD, "transfer_id": 7}, max_completion_tokens=1)
    sent = json.loads(p.upstream.body)
    assert sent.pop("kv_transfer_params") == {**COLD, "transfer_id": 7, "kvreturn": {"v": 1, "handle": handle()}}
    assert sent == json.loads(chat(*NEXT, max_completion_tokens=1, stream=False, max_tokens=1))
    told = sent_params(p.client.body)
    assert told == prefill_params(remote_request_id="chatcmpl-2", **report())
    d = await proxy.decode(NEXT, told, max_completion_tokens=50)
    if modes.request != Mode.STREAMED or modes.early:  # otherwise the nodes are chosen before the body is there
        assert (p.upstream.node, d.upstream.node) == (PREFILL, DECODE)
    assert router.outcomes() == {"first_turn": 1, "hit": 1}
    assert router.metric("handles_captured_total") == 2
    assert router.metric("read_back_tokens_total") == 160
    assert router.world.prefill.load(PREFILL) == router.world.decode.load(DECODE) == 0


async def test_the_one_token_of_a_prefill_leg_is_not_logged_as_the_turns_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvreturn.turn")
    await Proxy().prefill(FIRST)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "kvreturn.turn"]
    assert line.startswith("outcome=first_turn ")
    assert "completion=" not in line


async def test_the_orchestrators_headers_stay_but_ours() -> None:
    proxy = Proxy(headers={**JSON, "x-request-id": "a", "x-data-parallel-rank": "1", "x-kvreturn-node": "10.0.0.1:1"})
    for leg in (await proxy.prefill(FIRST), await proxy.decode(FIRST, prefill_params())):
        assert leg.upstream.headers is not None
        assert leg.upstream.headers["x-request-id"] == "a"
        assert leg.upstream.headers["x-data-parallel-rank"] == "1"
        assert "x-kvreturn-node" not in leg.upstream.headers


_OWN: dict[str, Any] = {
    "D's": {**handle(), "do_remote_decode": True},
    "D's, sealed by another router": {**COLD, "kvreturn": {"v": 1, "handle": handle()}},
    "P's, for a D that also prefills": prefill_params(),
    "blocks alone": {**COLD, "remote_block_ids": [[1]], "remote_num_tokens": 16},
}


@pytest.mark.parametrize("params", _OWN.values(), ids=_OWN)
async def test_a_leg_with_a_handle_of_its_own_is_left_alone_and_no_handle_is_used_twice(
    params: Any,  # noqa: ANN401 - JSON
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = Proxy()
    await proxy.turn(FIRST)
    p = await proxy.prefill(NEXT, params)
    assert p.upstream.body == chat(*NEXT, stream=False, max_tokens=1, kv_transfer_params=params)
    assert proxy.router.outcomes() == {"first_turn": 1, "foreign_handle": 1}
    assert proxy.router.handles == 1
    assert ("swapped" in caplog.text) == params["do_remote_prefill"]  # a decode leg, where none belongs
    # Nobody has proven what P read then, so what D makes of it is not given on.
    await proxy.decode(NEXT, sent_params(p.client.body))
    assert proxy.router.handles == 1


@pytest.mark.parametrize("params", [None, [], "x", {}, {"do_remote_decode": False}])
async def test_a_request_that_asks_for_no_transfer_is_no_prefill_leg(
    params: Any,  # noqa: ANN401 - JSON
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = Proxy()
    p = await proxy.prefill(FIRST, params, Response([b"{}"], headers=JSON))
    assert p.upstream.body == chat(*FIRST, stream=False, max_tokens=1, kv_transfer_params=params)
    assert p.client.body == b"{}"
    assert proxy.router.outcomes() == {"disabled": 1}
    assert "role prefill ask for no transfer" in caplog.text


# --- legs that do not belong together ---


@dataclass
class Strangers:
    """What is different on the D leg."""

    contents: Sequence[str] = ("Hi",)
    members: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)
    kept: bool = False


_LEGS = {
    "the same": Strangers(kept=True),
    "other limits": Strangers(
        members={"max_completion_tokens": 9, "temperature": 0.5, "stream_options": {}}, kept=True
    ),
    "P's address was rewritten": Strangers(params={"remote_host": "p.example"}, kept=True),
    "another message": Strangers(["Hi!"]),
    "tools": Strangers(members={"tools": [{"type": "function", "function": {"name": "f"}}]}),
    "reasoning, which fingerprints leave out": Strangers(members={"reasoning_effort": "high"}),
    "another salt": Strangers(members={"cache_salt": "x"}),
    "another request of P": Strangers(params={"remote_request_id": "chatcmpl-9"}),
    "another P": Strangers(params={"remote_engine_id": "another"}),
    "another tenant": Strangers(headers={**JSON, "authorization": "Bearer x"}),
}


@pytest.mark.parametrize("legs", _LEGS.values(), ids=_LEGS)
async def test_a_handle_is_kept_only_if_both_legs_have_the_same_prompt(legs: Strangers) -> None:
    proxy = Proxy()
    p = await proxy.prefill(FIRST)
    proxy.headers = legs.headers
    d = await proxy.decode(legs.contents, {**sent_params(p.client.body), **legs.params}, **legs.members)
    assert d.client.body == b"".join(decode_events())
    assert proxy.router.handles == legs.kept
    # Our connector on D is told not to keep blocks for nobody.
    assert sent_params(d.upstream.body).get("kvreturn") == (None if legs.kept else {"v": 1, "keep": False})
    proxy.headers = JSON
    await proxy.prefill([legs.contents[0], "Good morning", "And?"], **legs.members)
    last = set(proxy.router.outcomes()) - {"first_turn"}
    if legs.headers is JSON:
        assert last == {"hit" if legs.kept else "unproven"}
    else:
        assert last == {"not_a_continuation"}


@pytest.mark.parametrize(("counted", "kept"), [(114, 1), (115, 0)])
async def test_a_handle_is_not_kept_if_the_nodes_counted_the_prompt_differently(counted: int, kept: int) -> None:
    """Each tokenizes for itself, and between the two a template's date may have changed."""
    proxy = Proxy()
    p = await proxy.prefill(FIRST, response=Response([prefill_body(prompt=counted)], headers=JSON, node=PREFILL))
    body = chat(*FIRST, kv_transfer_params=sent_params(p.client.body))
    await proxy.play("decode", body, Response([decode_body(params=handle())], headers=JSON, node=DECODE))
    assert proxy.router.handles == kept


async def test_a_decode_leg_without_a_prefill_leg_leaves_nothing_that_stays_pinned() -> None:
    proxy = Proxy()
    await proxy.decode(FIRST, prefill_params())
    await proxy.router.world.returns.drain(1.0)
    (free,) = proxy.router.asks  # the verb by which D lets go (docs/handle-format.md)
    assert sent_params(free.body)["remote_request_id"] == "chatcmpl-d"
    assert proxy.router.handles == 0


async def test_a_decode_leg_that_is_sent_again_does_not_bring_d_blocks_that_p_has_let_go_of() -> None:
    """P's blocks can be read once. A D that has not read them itself cannot know that another one has."""
    proxy = Proxy()
    told = sent_params((await proxy.prefill(FIRST)).client.body)
    assert sent_params((await proxy.decode(FIRST, told)).upstream.body) == told
    again = await proxy.decode(FIRST, told)
    assert again.upstream.body == chat(*FIRST, stream=True)
    assert again.client.body == b"".join(decode_events())


# --- failures ---


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_what_a_handle_breaks_is_asked_for_once_more_without_it(status: int) -> None:
    proxy = Proxy()
    await proxy.turn(FIRST)
    p = await proxy.prefill(NEXT, response=Response([b"oh"], status, JSON, node=PREFILL))
    (ask,) = proxy.router.asks
    assert ask.body == chat(*NEXT, stream=False, max_tokens=1, kv_transfer_params=COLD)
    assert (p.client.status, p.client.body) == (200, prefill_body(prefill_params()))
    assert proxy.router.outcomes() == {"first_turn": 1, "read_failed": 1}
    assert proxy.router.metric("prefill_retries_total") == 1
    await proxy.decode(NEXT, sent_params(p.client.body))
    assert proxy.router.handles == 1


async def test_if_that_fails_too_the_orchestrator_gets_the_first_answer() -> None:
    proxy = Proxy(harness(answer(b"{}", 503)))
    await proxy.turn(FIRST)
    quoted = b'{"error":{"message":"bad","kv_transfer_params":{"remote_engine_id":"engine-of-d"}}}'
    p = await proxy.prefill(NEXT, response=Response([quoted], 500, JSON, node=PREFILL))
    assert p.client.status == 500
    assert b"the node refused the request" in p.client.body
    assert b"engine-of-d" not in p.client.body
    assert proxy.router.outcomes() == {"first_turn": 1, "prefill_failed": 1}


@pytest.mark.parametrize(
    ("contents", "status", "outcome"),
    [(["Else"], 500, "prefill_failed"), (["Else"], 400, "rejected"), (NEXT, 404, "rejected")],
)
async def test_other_refusals_pass(contents: Sequence[str], status: int, outcome: str) -> None:
    proxy = Proxy()
    await proxy.turn(FIRST)
    p = await proxy.prefill(contents, response=Response([b'{"error":"x"}'], status, JSON, node=PREFILL))
    assert (p.client.status, p.client.body) == (status, b'{"error":"x"}')
    assert not proxy.router.asks
    assert proxy.router.outcomes()[outcome] == 1


_BODIES = (b"", b"no JSON", b"[]", b'{"model":"m","messages":"x"}', b'{"model":"m","messages":[]}', b'{"model":5}')


@pytest.mark.parametrize("body", _BODIES[1:])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_cannot_be_read_is_the_nodes_to_refuse(role: str, body: bytes) -> None:
    proxy = Proxy()
    leg = await proxy.play(role, body, Response([b"{}"], 400, JSON))
    assert leg.upstream.body == body
    assert (leg.client.status, leg.client.body) == (400, b"{}")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings", "/inference/v1/generate"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_other_requests_pass_with_their_parameters(role: str, path: str) -> None:
    proxy = Proxy()
    body = json.dumps({"kv_transfer_params": handle()}).encode()
    leg = await proxy.play(role, body, Response([body], headers=JSON), path)
    assert (leg.upstream.body, leg.client.body) == (body, body)
    assert proxy.router.outcomes() == {}


async def test_a_stored_response_of_a_decode_node_has_its_handle_in_it_and_does_not_show_it() -> None:
    proxy, path = Proxy(), "/v1/responses/resp_1"
    kept = json.dumps({"id": "resp_1", "kv_transfer_params": handle()}).encode()
    for method, pieces in (("GET", []), ("POST", [b"{}"])):
        for role, shown in (("decode", b'{"id": "resp_1"}'), ("prefill", kept)):
            envoy = proxy.router.envoy(role=role)
            await envoy.play(Request(path, pieces, method, headers=JSON), Response([kept], headers=JSON))
            assert envoy.client.body == shown, (method, role)


async def test_a_handle_that_a_client_hid_in_another_member_does_not_pass() -> None:
    proxy = Proxy()
    for leg in (
        await proxy.prefill(FIRST, vllm_xargs={"kv_transfer_params": handle(), "a": 1}),
        await proxy.decode(FIRST, prefill_params(), vllm_xargs={"kv_transfer_params": handle(), "a": 1}),
    ):
        assert json.loads(leg.upstream.body)["vllm_xargs"] == {"a": 1}


_HIDING: dict[str, Callable[[Any], bytes]] = {
    "behind more than we parse": lambda x: chat("Hi", vllm_xargs={"kv_transfer_params": x, "a": "a" * 300_000}),
    "beside more members than we read": lambda x: chat(
        "Hi", vllm_xargs={"kv_transfer_params": x}, **{f"m{i}": 0 for i in range(10_001)}
    ),
    "below more levels than we go": lambda x: chat("Hi", vllm_xargs={"kv_transfer_params": x}, deep="?").replace(
        b'"?"', b"[" * 9_000 + b"]" * 9_000
    ),
    "in an encoding that only the node knows": lambda x: (
        chat("Hi", vllm_xargs={"kv_transfer_params": x}).decode().encode("utf-16")
    ),
    "in a prompt that we do not understand": lambda x: chat("Hi", messages=5, vllm_xargs={"kv_transfer_params": x}),
}


@pytest.mark.parametrize("body", _HIDING.values(), ids=_HIDING)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_handle_that_a_client_hid_where_we_cannot_look_does_not_pass(
    role: str, body: Callable[[Any], bytes]
) -> None:
    leg = await Proxy().play(role, body(handle()), Response([b"{}"], headers=JSON))
    assert b"engine-of-d" not in leg.upstream.body.replace(b"\0", b"")
    assert leg.client.status == (400 if not leg.upstream.body else 200)


async def test_a_store_that_fails_makes_turns_cold_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(harness(store={"deadline": 0.05}))
    monkeypatch.setattr(proxy.router.world.store, "take", lambda _: asyncio.sleep(3600))
    p = await proxy.prefill(FIRST)
    d = await proxy.decode(FIRST, sent_params(p.client.body))
    assert (p.client.status, d.client.status) == (200, 200)
    assert proxy.router.outcomes() == {"store_unavailable": 1}
    assert proxy.router.handles == 0


async def test_without_the_tenants_header_nothing_is_reused() -> None:
    proxy = Proxy(harness(tenant_header="x-tenant"))
    await proxy.turn(FIRST)
    await proxy.turn(NEXT)
    assert proxy.router.outcomes() == {"disabled": 2}
    assert proxy.router.handles == 0
    proxy.headers = {**JSON, "x-tenant": "a"}
    await proxy.turn(FIRST)
    await proxy.turn(NEXT)
    assert proxy.router.outcomes() == {"disabled": 2, "first_turn": 1, "hit": 1}


async def test_both_legs_get_their_tenants_salt() -> None:
    proxy = Proxy(harness(tenant_cache_salt=True))
    p = await proxy.prefill(FIRST)
    d = await proxy.decode(FIRST, sent_params(p.client.body))
    salts = {json.loads(leg.upstream.body)["cache_salt"] for leg in (p, d)}
    assert len(salts) == 1
    assert salts.pop().startswith("kvreturn-salt-")
    assert proxy.router.handles == 1


async def test_another_word_for_a_role_is_refused() -> None:
    router = Proxy().router
    envoy = router.envoy(role="prefil")
    await envoy.play(Request(pieces=[chat("Hi")]), Response())
    assert envoy.failed is grpc.StatusCode.INVALID_ARGUMENT
    assert not router.service.running


# --- proof by the router, or none ---


@pytest.mark.parametrize("level", ["trusted", "router"])
async def test_other_proof_levels_put_ds_object_over_the_orchestrators(level: str) -> None:
    tokens = list(range(160))
    proxy = Proxy(harness(answer(json.dumps({"tokens": [*tokens, 5]}).encode()), proof=level))
    p = await proxy.prefill(FIRST)
    body = chat(*FIRST, kv_transfer_params=sent_params(p.client.body))
    await proxy.play(
        "decode",
        body,
        Response([decode_body(params=d_handle(tokens, secret=b"a secret of these tests"))], headers=JSON, node=DECODE),
    )
    p = await proxy.prefill(NEXT, {**COLD, "transfer_id": 7}, Response([prefill_body(prompt=161)], headers=JSON))
    sent = sent_params(p.upstream.body)
    assert (sent["remote_num_tokens"], sent["do_remote_decode"], sent["transfer_id"]) == (160, True, 7)
    # What the router has proven is what P computes: it would render the messages anew otherwise.
    assert sent.get("prompt_token_ids") == ([*tokens, 5] if level == "router" else None)
    assert proxy.router.outcomes() == {"first_turn": 1, "hit": 1}
    assert "kv_transfer_params" in json.loads(p.client.body)


async def test_a_prompt_that_p_counts_otherwise_than_was_proven_does_not_go_to_d() -> None:
    tokens = list(range(160))
    proxy = Proxy(harness(answer(json.dumps({"tokens": [*tokens, 5]}).encode()), proof="router"))
    p = await proxy.prefill(FIRST)
    body = chat(*FIRST, kv_transfer_params=sent_params(p.client.body))
    await proxy.play(
        "decode",
        body,
        Response([decode_body(params=d_handle(tokens, secret=b"a secret of these tests"))], headers=JSON, node=DECODE),
    )
    p = await proxy.prefill(NEXT, response=Response([prefill_body(prompt=170)], headers=JSON))
    assert "kv_transfer_params" not in json.loads(p.client.body)
    assert proxy.router.outcomes() == {"first_turn": 1, "unproven": 1}


async def test_a_handle_is_taken_once() -> None:
    proxy = Proxy()
    await proxy.turn(FIRST)
    first, second = await proxy.prefill(NEXT), await proxy.prefill(NEXT)
    assert carried_handle(first.upstream.body) == handle()
    assert carried_handle(second.upstream.body) is None
    assert proxy.router.outcomes() == {"first_turn": 1, "hit": 1, "already_taken": 1}


async def test_conversations_come_back_to_the_ranks_of_a_prefill_node_that_have_them() -> None:
    proxy = Proxy(harness(pools={"prefill": {"static": [PREFILL], "ranks": 2}, "decode": [DECODE]}), headers=JSON)
    ranks = []
    for contents in (["a"], ["b"], ["b", "Good morning", "And?"], ["a", "Good morning", "And?"]):
        p = await proxy.turn(contents)
        assert p.upstream.headers is not None
        ranks.append(p.upstream.headers["x-data-parallel-rank"])
    assert ranks == ["0", "1", "1", "0"]


async def test_the_admin_view_tells_of_a_turn_once_and_keeps_none_that_is_over() -> None:
    proxy = Proxy()
    await proxy.turn(FIRST)
    await proxy.turn(NEXT)
    board = proxy.router.world.board
    assert board.live() == []
    assert [view.outcome.value for _, view in board.recent()] == ["hit", "first_turn"]
