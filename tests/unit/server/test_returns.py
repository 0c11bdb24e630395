"""Eager returns: what goes to P after a turn, who gets the handle, and what the next turn does."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvreturn.core.choice import Pressure
from kvreturn.core.handle import read_handle
from kvreturn.core.ports import Ask, Failure, Record, Reply
from support.extproc import Envoy, Request, Response
from support.harness import DECODE, Clock, Harness, counts, settings
from support.nodes import (
    StubPrefill,
    chat,
    decode_body,
    decode_events,
    prefill_body,
    prefill_params,
    report,
    sent_params,
)
from support.turns import d_handle

P1, P2 = "10.0.0.1:8100", "10.0.0.3:8100"
PROMPT = list(range(1, 151))
GENERATED = tuple(range(151, 162))
FIRST = Request(pieces=[chat("Hi")])
NEXT = Request(pieces=[chat("Hi", "Good morning", "And?")])


def _handle() -> dict[str, Any]:
    """160 tokens, with the digests of just these."""
    whole = d_handle([*PROMPT, *GENERATED[:10]])
    whole["kvreturn"]["generated"] = list(GENERATED)
    return whole


class Node(StubPrefill):
    """P in all its kinds, answering at once; returns wait for `gate`.

    Args:
        own: whether our connector runs there.
        bidirectional: whether `bidirectional_kv_xfer` is on.
    """

    def __init__(self, *, own: bool = True, bidirectional: bool = True) -> None:
        super().__init__()
        self.own, self.bidirectional = own, bidirectional
        self.gate = asyncio.Event()
        self.gate.set()
        self.returned: Callable[[], Reply] = lambda: self._reply(self._report(read=160))
        self.turns = 0
        self.engine = "engine-of-p"
        self.prompt = PROMPT
        self.probe_status = 200

    async def ask(self, ask: Ask, headers: Any, seconds: float) -> Reply:  # noqa: ANN401 - not looked at
        del seconds
        self.headers.append(headers)
        self.asks.append(ask)
        body = json.loads(ask.body)
        if ask.path == "/v1/chat/completions":
            self.turns += 1
            return self._reply(self._report(local=144 if self.turns > 1 else 0))
        if body["prompt"] == [1]:
            return self._probed(body)
        await self.gate.wait()
        return self.returned()

    def _report(self, **counts: int) -> dict[str, Any]:
        return report(**{"proven": 0, "read": 0} | counts) if self.own else {}  # type: ignore[arg-type]

    def _reply(self, told: dict[str, Any]) -> Reply:
        body = json.loads(prefill_body(prefill_params(remote_engine_id=self.engine, **told), prompt=150))
        return Reply(P1, 200, json.dumps({**body, "prompt_token_ids": self.prompt}).encode())

    def _probed(self, body: dict[str, Any]) -> Reply:
        if body.get("model") != "m":
            return Reply(P1, 404, b"{}")
        found = {"kv_transfer_params": {"remote_block_ids": [[1]]}} if self.bidirectional else {}
        return Reply(P1, self.probe_status, json.dumps({"choices": [{}], **found}).encode())

    @property
    def returns(self) -> list[dict[str, Any]]:
        """What was asked to be read back."""
        bodies = [json.loads(a.body) for a in self.asks if a.path == "/v1/completions"]
        return [b for b in bodies if b["prompt"] != [1]]


def router(node: Node, **changes: Any) -> Harness:  # noqa: ANN401 - settings
    return Harness(settings(**{"secret": "", "return": "eager", **changes}), node, Clock())


async def play(router: Harness, request: Request = FIRST, *, ids: bool = False) -> Envoy:
    """A turn that ends well, and what follows it, as far as it goes by itself."""
    if ids:
        choice = {"index": 0, "message": {"content": "Good morning"}, "finish_reason": "stop", "token_ids": GENERATED}
        handle = {k: v for k, v in _handle().items() if k != "kvreturn"}
        body = decode_body(params=handle, choices=[choice], prompt_token_ids=PROMPT)
        response = Response([body], headers={"content-type": "application/json"}, node=DECODE)
    else:
        response = Response(decode_events(params=_handle()), node=DECODE)
    envoy = await router.play(request, response)
    await settled()
    return envoy


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def results(router: Harness) -> dict[str, int]:
    """Returns by what became of them."""
    return counts(router.world.metrics.returns, "result")


# --- going back ---


async def test_after_a_turn_p_is_asked_for_just_what_d_holds() -> None:
    node = Node()
    r = router(node)
    await play(r)
    (sent,) = node.returns
    assert sent["prompt"] == [*PROMPT, *GENERATED]
    assert sent["kv_transfer_params"]["kvreturn"]["handle"] == _handle()
    assert sent["kv_transfer_params"]["kvreturn"]["keep"] is False
    assert (node.asks[-1].prefer, node.asks[-1].only) == (P1, True)
    assert results(r) == {"returned": 1}
    assert r.metric("returned_tokens_total") == 160


async def test_the_next_turn_goes_there_without_a_handle_and_hits() -> None:
    node = Node()
    r = router(node)
    await play(r)
    await play(r, NEXT)
    turns = [a for a in node.asks if a.path == "/v1/chat/completions"]
    assert turns[1].prefer == P1
    assert "handle" not in sent_params(turns[1].body).get("kvreturn", {})
    assert r.outcomes() == {"first_turn": 1, "hit": 1}


@pytest.mark.parametrize(("read", "saved"), [(160, 144), (48, 32), (0, 0)])
async def test_saved_is_what_came_from_d_and_not_what_p_had_itself(read: int, saved: int) -> None:
    """Of the 160 tokens that D held, P still has 144; what it had before the return did, it would have anyway."""
    node = Node()
    reason = {} if read else {"reason": "local_hit"}
    node.returned = lambda: node._reply(report(proven=160, read=read, local=160 - read, **reason))
    r = router(node)
    await play(r)
    await play(r, NEXT)
    assert r.outcomes() == {"first_turn": 1, "hit": 1}
    assert r.metric("prefill_saved_tokens_total") == saved


async def test_a_turn_that_waited_for_its_return_saves_what_that_brought() -> None:
    node = Node()
    r = router(node)
    node.gate.clear()
    await play(r)
    turn = asyncio.create_task(play(r, NEXT))
    await settled()
    assert node.turns == 1
    node.gate.set()
    await turn
    assert r.metric("prefill_saved_tokens_total") == 144


async def test_a_gap_longer_than_ds_ttl_is_no_matter() -> None:
    node = Node()
    r = router(node)
    await play(r)
    r.clock.now += 2 * 480  # type: ignore[attr-defined]
    await play(r, NEXT)
    assert r.outcomes() == {"first_turn": 1, "hit": 1}


@pytest.mark.parametrize(("bidirectional", "direction"), [(True, "do_remote_decode"), (False, "do_remote_prefill")])
async def test_a_stock_p_is_probed_once_and_then_gets_what_it_understands(
    *, bidirectional: bool, direction: str
) -> None:
    node = Node(own=False, bidirectional=bidirectional)
    node.returned = lambda: Reply(P1, 200, b"data: {}\n\n")
    r = router(node, proof="off")
    for request in (FIRST, NEXT):
        await play(r, request, ids=True)
    assert [s["kv_transfer_params"][direction] for s in node.returns] == [True, True]
    assert sum(json.loads(a.body)["prompt"] == [1] for a in node.asks if a.path == "/v1/completions") == 1
    assert [a.first for a in node.asks if a.only][-1] is bidirectional


async def test_a_stock_p_that_restarted_is_probed_again() -> None:
    node = Node(own=False)
    r = router(node, proof="off")
    await play(r, ids=True)
    node.engine = "another"
    await play(r, NEXT, ids=True)
    assert sum(json.loads(a.body)["prompt"] == [1] for a in node.asks if a.path == "/v1/completions") == 2


async def test_a_p_that_the_probe_cannot_tell_gets_nothing() -> None:
    node = Node(own=False)
    node.probe_status = 500
    r = router(node, proof="off")
    await play(r, ids=True)
    assert node.returns == []
    assert results(r) == {"unknown_node": 1}


async def test_ids_that_were_asked_for_here_do_not_reach_the_client() -> None:
    r = router(Node(own=False), proof="off")
    envoy = await play(r, ids=True)
    assert json.loads(envoy.upstream.body)["return_token_ids"] is True
    client = json.loads(envoy.client.body)
    assert client["prompt_token_ids"] is None
    assert client["choices"][0]["token_ids"] is None


async def test_ids_that_the_client_asked_for_do() -> None:
    r = router(Node(own=False), proof="off")
    envoy = await play(r, Request(pieces=[chat("Hi", return_token_ids=True)]), ids=True)
    assert json.loads(envoy.client.body)["prompt_token_ids"] == PROMPT


async def test_tokens_that_are_not_ds_stay_where_they_are() -> None:
    node = Node()
    node.prompt = PROMPT[:3]
    r = router(node)
    await play(r)
    assert node.returns == []
    assert results(r) == {"too_few_tokens": 1}
    assert r.handles == 1  # and the next turn reads lazily


# --- whose the handle is ---


async def test_a_turn_that_comes_first_has_the_handle() -> None:
    node = Node()
    r = router(node, returns={"concurrency": 1})
    node.gate.clear()
    await play(r, Request(pieces=[chat("Another conversation")]))  # its return holds the only slot
    await play(r)
    assert r.handles == 1
    await play(r, NEXT)
    turn = [a for a in node.asks if a.path == "/v1/chat/completions"][-1]
    assert sent_params(turn.body)["kvreturn"]["handle"] == _handle()
    node.gate.set()
    await settled()
    assert results(r) == {"returned": 2, "taken": 1}  # the first's, and the third's own


async def test_a_turn_that_comes_meanwhile_waits_for_the_return() -> None:
    node = Node()
    r = router(node)
    node.gate.clear()
    await play(r)
    turn = asyncio.create_task(play(r, NEXT))
    await settled()
    assert node.turns == 1
    assert r.handles == 0
    node.gate.set()
    await turn
    assert node.turns == 2
    assert r.outcomes() == {"first_turn": 1, "hit": 1}


async def test_it_does_not_wait_for_ever() -> None:
    node = Node()
    r = router(node, returns={"wait": 0.01})
    node.gate.clear()
    await play(r)
    turn = asyncio.create_task(play(r, NEXT))
    await asyncio.wait_for(turn, 5)
    assert r.outcomes() == {"first_turn": 1, "return_failed": 1}
    node.gate.set()
    await settled()


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (Reply(P1, failure=Failure.TIMEOUT), "timeout"),
        (Reply(P1, failure=Failure.CONNECT), "unreachable"),
        (Reply(P1, 500, b""), "refused"),
        (Reply(P2, 200, b"{}"), "moved"),
    ],
)
async def test_a_return_that_failed_costs_the_next_turn_no_more_than_a_prefill(reply: Reply, result: str) -> None:
    node = Node()
    node.returned = lambda: reply
    r = router(node)
    await play(r)
    assert results(r) == {result: 1}
    assert json.loads(node.asks[-1].body)["kv_transfer_params"]["kvreturn"]["free"] is True  # whatever P made of it
    await play(r, NEXT)
    assert r.outcomes() == {"first_turn": 1, "return_failed": 1}
    assert r.metric("prefill_retries_total") == 0


# --- bounds ---


@pytest.mark.parametrize(
    ("limits", "result"),
    [
        ({"max_tokens": 159}, "too_large"),
        ({"queue": 1, "concurrency": 1, "patience": 60}, "queue_full"),
        ({"per_tenant": 2, "concurrency": 1}, "tenant_limit"),
        ({"concurrency": 1, "patience": 0.01}, "busy"),
    ],
)
async def test_what_is_over_a_limit_stays_lazy(limits: dict[str, Any], result: str) -> None:
    node = Node()
    node.gate.clear()
    r = router(node, returns=limits)
    for i in range(3):
        await play(r, Request(pieces=[chat(f"Conversation {i}")]))
    await asyncio.sleep(0.05)
    assert results(r).get(result)
    assert r.handles >= 1
    node.gate.set()
    await settled()


async def test_a_node_gets_no_more_tokens_per_second_than_it_may() -> None:
    node = Node()
    r = router(node, returns={"rate": 3200, "patience": 0.2})  # 160 tokens each: one in 50 ms
    for i in range(3):
        await play(r, Request(pieces=[chat(f"Conversation {i}")]))
    assert len(node.returns) == 1
    await asyncio.sleep(0.08)
    assert len(node.returns) == 2
    await asyncio.sleep(0.08)
    assert results(r) == {"returned": 3}


async def test_what_does_not_go_back_costs_the_next_ones_nothing() -> None:
    clock = Clock()
    node = Node()
    r = Harness(settings(secret="", **{"return": "eager", "returns": {"rate": 160, "patience": 0.5}}), node, clock)
    for i in range(10):
        await play(r, Request(pieces=[chat(f"Conversation {i}")]))
    assert results(r) == {"returned": 1, "busy": 9}
    clock.now += 1.0  # 160 tokens later
    await play(r, Request(pieces=[chat("Another one")]))
    assert results(r) == {"returned": 2, "busy": 9}


async def test_what_would_have_to_wait_too_long_for_its_rate_stays_lazy() -> None:
    node = Node()
    r = router(node, returns={"rate": 1, "patience": 0.01})
    for i in range(2):
        await play(r, Request(pieces=[chat(f"Conversation {i}")]))
    await asyncio.sleep(0.05)
    assert results(r) == {"returned": 1, "busy": 1}


async def test_the_handle_of_one_of_several_choices_is_freed() -> None:
    node = Node()
    r = router(node)
    await play(r, Request(pieces=[chat("Hi", n=2)]))
    freed = [json.loads(a.body) for a in node.asks if a.path == "/v1/completions"]
    assert [f["kv_transfer_params"]["kvreturn"]["free"] for f in freed] == [True]


async def test_a_busy_p_is_left_alone() -> None:
    node = Node()
    r = router(node, returns={"prefill_load": 100, "patience": 0.05})
    r.world.prefill.started(P1, 101)
    await play(r)
    await asyncio.sleep(0.1)
    assert node.returns == []
    assert results(r) == {"busy": 1}


@pytest.mark.parametrize(
    "request_",
    [chat("Hi", n=2), chat("Hi", best_of=2)],
)
async def test_several_choices_do_not_go_back(request_: bytes) -> None:
    node = Node()
    await play(router(node), Request(pieces=[request_]))
    assert node.returns == []


async def test_the_log_says_how_it_goes_back_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvreturn.turn")
    await play(router(Node()))
    await play(router(Node(), returns={"max_tokens": 159}))
    await play(router(Node(), **{"return": "auto"}))
    await play(router(Node(), **{"return": "lazy"}))
    lines = [r.getMessage() for r in caplog.records if r.name == "kvreturn.turn"]
    words = [next(w for w in line.split() if w.startswith("return=")) for line in lines]
    assert words == ["return=eager(fixed)", "return=lazy(too_large)", "return=lazy(default)", "return=-"]


async def test_ids_that_the_client_asked_for_are_not_all_of_a_prompt_with_pictures() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": "m", "messages": [{"role": "user", "content": [picture]}], "return_token_ids": True}
    node = Node()
    r = router(node)
    await play(r, Request(pieces=[json.dumps(body).encode()]))
    assert node.returns == []
    assert r.handles == 1


async def test_lazy_is_lazy() -> None:
    node = Node()
    await play(router(node, **{"return": "lazy"}))
    assert node.returns == []


async def test_the_model_decides() -> None:
    node = Node()
    await play(router(node, models={"m": {"return": "lazy"}}))
    assert node.returns == []


# --- what auto left on D ---


def look(r: Harness, *, waiting: int = 0, pinned: float = 0.5) -> None:
    """D tells how it is."""
    r.world.pressure.told(DECODE, Pressure(0.9, waiting, 8, pinned))


async def test_what_was_left_on_a_calm_d_goes_back_once_it_is_full() -> None:
    node = Node()
    r = router(node, **{"return": "auto"})
    await play(r)
    assert node.returns == []
    look(r)
    await settled()
    assert [sent["prompt"] for sent in node.returns] == [[*PROMPT, *GENERATED]]
    assert (r.handles, r.metric("return_recalls_total")) == (0, 1)
    look(r)
    await settled()
    assert len(node.returns) == 1
    await play(r, NEXT)
    assert r.outcomes() == {"first_turn": 1, "hit": 1}


async def test_each_look_brings_as_many_back_as_p_takes_at_a_time() -> None:
    node = Node()
    r = router(node, **{"return": "auto", "returns": {"concurrency": 2}})
    for text in ("one", "two", "three"):
        await play(r, Request(pieces=[chat(text)]))
    for left in (1, 0, 0):
        look(r)
        await settled()
        assert (len(node.returns), r.handles) == (3 - left, left)


async def test_what_the_next_turn_has_taken_does_not_go_back() -> None:
    node = Node()
    r = router(node, **{"return": "auto"})
    await play(r)
    assert isinstance(r.clock, Clock)
    r.clock.now += 100
    await r.envoy().request(NEXT)
    look(r)
    await settled()
    assert node.returns == []
    assert r.metric("return_recalls_total") == 0


@pytest.mark.parametrize(("waiting", "goes"), [(0, 0), (1, 1)])
async def test_a_pressed_p_gets_it_only_from_a_d_that_is_starved(waiting: int, goes: int) -> None:
    node = Node()
    r = router(node, **{"return": "auto"})
    r.world.pressure._note(P1, Pressure(0.9, 9, 1))
    await play(r)
    look(r, waiting=waiting)
    await settled()
    assert len(node.returns) == goes


async def test_what_is_computed_faster_than_read_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    r = router(node, **{"return": "auto"})
    monkeypatch.setattr(r.world.judge, "worth_reading", lambda *_: False)
    await play(r)
    look(r, waiting=5)
    await settled()
    assert node.returns == []


class Reading(Node):
    """P that proves and reads all 160 tokens but those that it has itself."""

    def __init__(self, local: int, address: str) -> None:
        super().__init__()
        self.local, self.address = local, address

    async def ask(self, ask: Ask, headers: Any, seconds: float) -> Reply:  # noqa: ANN401 - not looked at
        if ask.path != "/v1/chat/completions" or not self.turns:
            return await super().ask(ask, headers, seconds)
        self.asks.append(ask)
        return replace(self._reply(report(read=160 - self.local, local=self.local)), node=self.address)


@pytest.mark.parametrize(
    ("local", "address", "fates"),
    [
        (144, P1, {"used": 1}),
        (22, P1, {"used": 1}),  # 150 less one large block
        (21, P1, {"evicted": 1}),
        (0, P2, {}),  # another P, which never had it
    ],
)
async def test_a_lazy_turn_shows_whether_p_keeps_what_it_has(local: int, address: str, fates: dict[str, int]) -> None:
    r = router(Reading(local, address), **{"return": "auto"})
    await play(r)
    await r.envoy().request(NEXT)
    assert r.outcomes() == {"first_turn": 1}  # the other one has not ended
    assert r.world.returns.chooser.view().prefill[P1].fates == fates


# --- freeing, and the end ---


async def test_what_goes_to_p_brings_the_clients_credentials() -> None:
    """VLLM's `--api-key` holds for all of `/v1`."""
    node = Node(own=False)
    r = router(node, proof="off", returns={"max_tokens": 1_000})
    request = Request(pieces=[chat("Hi")], headers={"content-type": "application/json", "authorization": "Bearer k"})
    await play(r, request, ids=True)
    assert [json.loads(a.body).get("prompt") == [1] for a in node.asks] == [False, True, False]  # turn, probe, return
    assert [h["authorization"] for h in node.headers] == ["Bearer k"] * 3


async def test_without_them_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    node.returned = lambda: Reply(P1, 401, b"{}")
    r = router(node)
    for i in range(2):
        await play(r, Request(pieces=[chat(f"Conversation {i}")]))
    assert results(r) == {"refused": 2}
    assert caplog.text.count("takes no credentials") == 1


async def test_a_p_that_was_replaced_since_the_turn_gets_nothing() -> None:
    node = Node(own=False)
    r = router(node, proof="off", returns={"concurrency": 1})
    node.gate.clear()
    await play(r, Request(pieces=[chat("Another conversation")]), ids=True)
    await play(r, ids=True)  # waits for its turn
    r.world.forms.saw(P1, "another", proves=False)
    node.gate.set()
    await settled()
    assert results(r) == {"returned": 1, "unknown_node": 1}


async def test_a_stock_p_that_hung_is_probed_before_the_next_return() -> None:
    node = Node(own=False)
    node.returned = lambda: Reply(P1, failure=Failure.TIMEOUT)
    r = router(node, proof="off")
    await play(r, ids=True)
    assert results(r) == {"timeout": 1}
    assert r.world.forms.form(P1) is None


@pytest.mark.parametrize("limits", [{"max_tokens": 159}, {"prefill_load": 100, "patience": 0.01}])
async def test_what_neither_goes_back_nor_can_be_read_is_freed(limits: dict[str, Any]) -> None:
    node = Node(own=False)
    r = router(node, proof="off", returns=limits)
    r.world.prefill.started(P1, 101)
    await play(r, ids=True)
    await asyncio.sleep(0.03)
    await settled()
    assert r.handles == 0
    assert r.metric("frees_total", result="sent") == 1


async def test_without_ids_and_without_proof_the_handle_is_freed_at_once() -> None:
    node = Node(own=False)
    r = router(node, proof="off")
    stock = {k: v for k, v in _handle().items() if k != "kvreturn"}
    await r.play(FIRST, Response(decode_events(params=stock), node=DECODE))
    await settled()
    assert r.handles == 0
    assert node.returns == []
    assert r.metric("frees_total", result="sent") == 1


async def test_a_handle_whose_put_is_late_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the store all the same, and the next turn may take it."""
    node = Node()
    r = router(node, **{"return": "lazy"})
    put = r.world.store.put

    async def late(keys: Sequence[bytes], record: Record, conversation: bytes | None) -> bytes:
        await put(keys, record, conversation)
        raise TimeoutError

    monkeypatch.setattr(r.world.store, "put", late)
    await play(r)
    assert r.handles == 1
    assert r.metric("frees_total", result="sent") == 0


async def test_a_handle_that_cannot_be_used_is_freed() -> None:
    node = Node()
    r = router(node, **{"return": "lazy"})
    await play(r)
    for _ in range(5):
        r.world.judge.read_failed(read_handle(json.dumps(_handle()).encode()))
    await play(r, NEXT)
    assert r.outcomes() == {"first_turn": 1, "breaker_open": 1}
    freed = [json.loads(a.body) for a in node.asks if a.path == "/v1/completions"]
    assert [f["kv_transfer_params"]["kvreturn"]["free"] for f in freed] == [True]
    assert r.metric("frees_total", result="sent") == 1


async def test_a_drain_lets_returns_end() -> None:
    node = Node()
    r = router(node)
    node.gate.clear()
    await play(r)
    drain = asyncio.create_task(r.world.returns.drain(5))
    await settled()
    assert not drain.done()
    node.gate.set()
    await drain
    assert results(r) == {"returned": 1}


async def test_a_drain_does_not_wait_for_ever() -> None:
    node = Node()
    r = router(node)
    node.gate.clear()
    await play(r)
    await asyncio.wait_for(r.world.returns.drain(0.01), 5)
    assert r.world.returns.running == 0


async def test_what_goes_back_is_under_the_tenants_salt_as_both_legs_were() -> None:
    node = Node()
    node.prompt = list(range(1, 161))
    there = router(node, secret="s", tenant_cache_salt=True)
    envoy = there.envoy()
    await envoy.request(FIRST)
    salt = json.loads(envoy.upstream.body)["cache_salt"]
    held = d_handle(160, secret=b"s", salt=salt)  # D's digests are made under it, and told apart from others by it
    await envoy.respond(Response(decode_events(params=held), node=DECODE))
    await envoy.finish()
    await settled()
    assert [(back["cache_salt"], back["prompt"]) for back in node.returns] == [(salt, [*range(1, 161), 7])]
    await play(there, NEXT)
    assert there.outcomes() == {"first_turn": 1, "hit": 1}
