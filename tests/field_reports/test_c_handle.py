"""Section C of the field reports, as far as the core alone shows it: handles, the two bodies, and who continues what.

Reports that need a whole exchange are in `test_c_turn.py`. Where a report asks for `cold` because messages differ, and
design.md lets tokens decide instead, the case is shown at both proof levels.
"""

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvreturn.core.cost import CostModel
from kvreturn.core.handle import clipped, direct, read_handle, sealed
from kvreturn.core.outcome import Outcome
from kvreturn.core.policy import Policy
from kvreturn.core.ports import Forward, Reply, Taken
from kvreturn.settings.nodes import Breaker
from kvreturn.store.memory import MemoryStore
from kvreturn.upstream.forms import Forms
from kvreturn.upstream.judge import NodeJudge
from kvreturn.upstream.pool import Pool
from support.turns import (
    COLD,
    D1,
    P1,
    P2,
    Drive,
    Json,
    answered,
    compact,
    d_handle,
    found,
    p_error,
    p_params,
    p_reply,
    request,
)

CONNECTOR, TRUSTED = Policy(proof="connector"), Policy(proof="trusted")
FIRST, NEXT = request("Hello"), request("Hello", "Hi", "And now?")


class Clock:
    """Time stands still until it is told to go on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Router:
    """Turns over one store, as the server drives them."""

    policy: Policy = CONNECTOR
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        """Make the store."""
        self.store = MemoryStore(max_entries=1000, max_bytes=1 << 20, clock=self.clock)

    async def turn(self, body: Json, answer: Json | None = None, reply: Reply | None = None) -> Drive:
        """One turn from its request to its end."""
        taken = await self.store.take(Drive(body, policy=self.policy).keys)
        drive = Drive(body, [taken, reply or p_reply({"proven": 160, "read": 160})], self.policy)
        put, _, _ = drive.respond(
            answer if answer is not None else answered("Hi", d_handle(proof=self.policy is CONNECTOR))
        )
        if put:
            await self.store.put(put.keys, put.record)
        return drive


def handle_sent(drive: Drive) -> Json | None:
    """The handle that P was given, in either form."""
    params: Json = drive.carried[0]
    inner: Json | None = params.get("kvreturn", {}).get("handle")
    return inner or (params if params["remote_block_ids"] else None)


async def test_fr53_a_d_that_never_sends_the_member() -> None:
    router = Router()
    await router.turn(FIRST, answered("Hi"))
    second = await router.turn(NEXT, answered("Hi"))
    assert second.carried == [COLD]
    assert second.facts.outcome == Outcome.NO_HANDLE_FROM_DECODE


async def test_fr54_of_20_concurrent_requests_one_carries_the_handle() -> None:
    router = Router()
    await router.turn(FIRST)
    turns = await asyncio.gather(*(router.turn(NEXT, answered("x")) for _ in range(20)))
    assert [t.facts.outcome for t in turns if handle_sent(t)] == [Outcome.HIT]


@pytest.mark.parametrize(("age", "there"), [(449.0, True), (451.0, False)])
async def test_fr55_a_handle_is_used_within_its_ttl_only(age: float, there: bool) -> None:  # noqa: FBT001
    router = Router()
    await router.turn(FIRST)
    router.clock.now = age
    second = await router.turn(NEXT, answered("x"))
    assert bool(handle_sent(second)) is there
    assert second.facts.outcome == (Outcome.HIT if there else Outcome.EXPIRED)
    assert router.store.handles == 0


def test_fr57_keys_that_are_not_known_survive() -> None:
    extra: Json = {"x_future": {"a": [1]}, "dcp_size": 2, "pp_size": 4}
    handle = read_handle(compact(d_handle(**extra)))
    assert json.loads(direct(handle)) == d_handle(**extra)
    assert json.loads(sealed(handle))["kvreturn"]["handle"] == d_handle(**extra)
    assert Drive(FIRST, [Taken(), p_reply(**extra)]).d_body["kv_transfer_params"] == p_params(**extra)


def test_fr58_each_node_gets_the_others_parameters_and_its_own_direction() -> None:
    handle = d_handle(proof=False)
    drive = Drive(NEXT, [found(handle), p_reply()], TRUSTED)
    limited = {**NEXT, "stream": False, "max_tokens": 1, "return_token_ids": True}
    assert drive.p_bodies == [
        limited | {"kv_transfer_params": handle | {"do_remote_decode": True, "do_remote_prefill": False}}
    ]
    assert drive.d_body == NEXT | {"kv_transfer_params": p_params()}
    assert drive.d_body["kv_transfer_params"]["do_remote_prefill"] is True


def test_fr59_a_miss_sends_the_cold_object() -> None:
    assert Drive(FIRST).carried == [
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    ]


async def test_fr60_an_older_handle_is_never_a_fallback() -> None:
    router = Router()
    await router.turn(FIRST)
    await router.turn(NEXT, answered("Fine"))
    assert router.store.handles == 0
    third = await router.turn(request("Hello", "Hi", "And now?", "Fine", "Go on"))
    assert third.carried == [COLD]
    assert third.facts.outcome == Outcome.NO_HANDLE_FROM_DECODE


def test_fr61_min_tokens_stays_with_d() -> None:
    drive = Drive(FIRST | {"min_tokens": 100, "max_tokens": 500})
    assert drive.p_bodies[0]["max_tokens"] == 1
    assert "min_tokens" not in drive.p_bodies[0]
    assert (drive.d_body["max_tokens"], drive.d_body["min_tokens"]) == (500, 100)


def test_fr62_max_completion_tokens_is_capped_on_p() -> None:
    drive = Drive(FIRST | {"max_completion_tokens": 800})
    assert (drive.p_bodies[0]["max_tokens"], drive.p_bodies[0]["max_completion_tokens"]) == (1, 1)
    assert drive.d_body["max_completion_tokens"] == 800
    assert "max_tokens" not in drive.d_body


@pytest.mark.parametrize(
    "more", [{}, {"max_tokens": 7}, {"kv_transfer_params": {"remote_host": "evil"}, "temperature": 0.1}]
)
def test_fr63_what_was_absent_stays_absent_on_d(more: Json) -> None:
    body = FIRST | more
    d_body = Drive(body).d_body
    assert d_body.pop("kv_transfer_params") == p_params()
    assert d_body == {k: v for k, v in body.items() if k != "kv_transfer_params"}


def test_fr64_only_d_streams() -> None:
    body = FIRST | {"stream": True, "stream_options": {"include_usage": True}}
    drive = Drive(body)
    assert drive.p_bodies[0]["stream"] is False
    assert "stream_options" not in drive.p_bodies[0]
    assert (drive.d_body["stream"], drive.d_body["stream_options"]) == (True, {"include_usage": True})


@pytest.mark.parametrize("n", [3, "3", 3.0])
async def test_fr65_several_choices_leave_no_handle(n: object) -> None:
    router = Router()
    drive = await router.turn(FIRST | {"n": n}, answered("Hi", d_handle()))
    assert drive.p_bodies[0]["n"] == 1
    assert drive.d_body["n"] == n
    assert router.store.handles == 0
    assert (await router.turn(NEXT)).facts.outcome == Outcome.MULTIPLE_CHOICES


KEPT = {
    "model": "m",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "chat_template_kwargs": {"enable_thinking": True},
    "documents": [{"text": "x"}],
    "reasoning_effort": "high",
    "add_generation_prompt": True,
    "continue_final_message": False,
    "mm_processor_kwargs": {"fps": 1},
    "cache_salt": "s",
    "response_format": {"type": "json_object"},
    "stop": ["x"],
    "add_special_tokens": False,
}
DROPPED = {
    "logprobs": True,
    "top_logprobs": 3,
    "prompt_logprobs": 1,
    "stream_options": {"include_usage": True},
    "min_tokens": 2,
    "echo": True,
    "best_of": 1,
    "use_beam_search": False,
}


def test_fr66_which_members_p_gets() -> None:
    body = FIRST | KEPT | DROPPED | {"stream": True}
    drive = Drive(body)
    p_body = drive.p_bodies[0]
    assert {k: p_body.get(k) for k in KEPT} == KEPT
    assert not DROPPED.keys() & p_body.keys()
    assert drive.d_body == body | {"kv_transfer_params": p_params()}


def test_fr71_a_d_that_rejects_leaves_nothing_and_its_answer_passes() -> None:
    drive = Drive(NEXT, [found(d_handle()), p_reply({"proven": 160, "read": 160})])
    refusal = b'{"error":{"message":"unknown model","type":"NotFoundError","param":null,"code":404}}'
    put, out, _ = drive.respond(refusal)
    assert put is None
    assert out == refusal
    assert drive.turn.answer.error == "404"


@pytest.mark.parametrize("fallback", [True, False])
def test_fr73_a_p_that_is_down_is_never_a_silent_matter(fallback: bool) -> None:  # noqa: FBT001
    drive = Drive(NEXT, [Taken(), p_error(503), p_error(503)], replace(CONNECTOR, fallback=fallback))
    assert drive.facts.outcome == Outcome.PREFILL_FAILED
    assert drive.facts.fallback is fallback
    if fallback:
        assert drive.d_body == NEXT
    else:
        assert not isinstance(drive.decision, Forward)
        assert drive.decision.status == 502


@pytest.mark.parametrize(
    ("groups", "usable"), [([[1, 2], [3]], True), ([[1, 2], []], True), ([[]], False), ([[], []], False), ([], False)]
)
async def test_fr74_blocks_are_lists_by_group(groups: list[list[int]], usable: bool) -> None:  # noqa: FBT001
    router = Router()
    handle = d_handle(remote_block_ids=groups)
    await router.turn(FIRST, answered("Hi", handle))
    assert router.store.handles == usable
    second = await router.turn(NEXT)
    assert handle_sent(second) == (handle if usable else None)


@pytest.mark.parametrize(
    ("message", "replayed", "attached"),
    [
        ({"reasoning": "hm"}, {}, False),
        ({"reasoning": "hm"}, {"reasoning": "hm"}, False),  # whether the template keeps it, only tokens can tell
        ({}, {}, True),
    ],
    ids=["reasoning dropped", "reasoning sent back", "plain text"],
)
async def test_fr75_an_answer_with_reasoning(message: Json, replayed: Json, attached: bool) -> None:  # noqa: FBT001
    body = {
        "model": "m",
        "messages": [
            *FIRST["messages"],
            {"role": "assistant", "content": "Hi", **replayed},
            {"role": "user", "content": "?"},
        ],
    }
    trusting, proving = Router(TRUSTED), Router()
    for router in (trusting, proving):
        await router.turn(FIRST, answered("Hi", d_handle(proof=router is proving), **message))
    # Without proof, equality is all there is: cold. With proof, P compares tokens, so the handle may be shown to it.
    assert bool(handle_sent(await trusting.turn(body))) is attached
    assert handle_sent(await proving.turn(body))


def with_call(arguments: str) -> Json:
    return {"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]}


async def test_fr76_tool_arguments_that_are_written_anew() -> None:
    body = {
        "model": "m",
        "messages": [
            *FIRST["messages"],
            {"role": "assistant", "content": None, **with_call('{"a": 2, "b": 1}')},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ],
    }
    trusting, proving = Router(TRUSTED), Router()
    for router in (trusting, proving):
        answer = answered(None, d_handle(proof=router is proving), **with_call('{"b":1, "a":2}'))
        await router.turn(FIRST, answer)
    assert handle_sent(await trusting.turn(body)) is None
    assert handle_sent(await proving.turn(body))  # the tokens before the arguments are the same: P proves how many


@pytest.mark.parametrize(
    ("body", "found_by_prompt"),
    [
        (FIRST, True),
        ({"model": "m", "messages": [{"role": "system", "content": "new"}, *NEXT["messages"]]}, False),
        (request("Hello!", "Hi", "And now?"), False),
        (request("Hello", "Hi there", "And now?"), True),
    ],
    ids=["regenerate", "system prompt", "user text", "answer edited"],
)
async def test_fr77_what_shares_only_a_part(body: Json, found_by_prompt: bool) -> None:  # noqa: FBT001
    trusting, proving = Router(TRUSTED), Router()
    for router in (trusting, proving):
        await router.turn(FIRST)
    assert handle_sent(await trusting.turn(body)) is None
    # What the two prompts have in common may be read where it is proven.
    assert bool(handle_sent(await proving.turn(body))) is found_by_prompt


async def test_fr78_threads_of_one_session_have_their_own_handles() -> None:
    router = Router()
    h1, h2 = d_handle(remote_request_id="t1"), d_handle(remote_request_id="t2")
    await router.turn(request("Root"), answered("A", h1))
    await router.turn(request("Sub-agent"), answered("B", h2))
    assert handle_sent(await router.turn(request("Sub-agent", "B", "go"))) == h2
    assert handle_sent(await router.turn(request("Root", "A", "go"))) == h1


async def test_fr79_port_and_engine_are_those_that_d_named() -> None:
    router = Router()
    handle = d_handle(remote_port=5601, remote_engine_id="abc_dp1", remote_host="localhost")
    await router.turn(FIRST, answered("Hi", handle))
    sent = handle_sent(await router.turn(NEXT))
    assert sent == handle | {"remote_host": "10.1.0.1"}


@pytest.mark.parametrize(
    ("host", "answered_by", "expected"),
    [
        ("localhost", "10.0.0.2", "10.0.0.2"),
        ("0.0.0.0", "10.0.0.2", "10.0.0.2"),
        ("10.0.0.7", "10.0.0.2", "10.0.0.7"),
        ("fd00::1", "10.0.0.2", "fd00::1"),
        ("::1", "fd00::1", "fd00::1"),
    ],
)
def test_fr80_only_a_host_that_names_no_machine_is_rewritten(host: str, answered_by: str, expected: str) -> None:
    raw = read_handle(compact(d_handle(remote_host=host)), answered_by).raw
    assert json.loads(raw) == d_handle(remote_host=expected)


def test_fr80_an_upstream_address_with_brackets() -> None:
    put, _, _ = Drive(FIRST).respond(answered("Hi", d_handle(remote_host="localhost")), node="[fd00::1]:8200")
    assert put
    assert json.loads(put.record.handle or b"")["remote_host"] == "fd00::1"


async def test_fr82_another_image_is_another_prompt() -> None:
    def asks(url: str, *more: Json) -> Json:
        content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
        return {"model": "m", "messages": [{"role": "user", "content": content}, *more]}

    following = ({"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Sure?"})
    for policy in (CONNECTOR, TRUSTED):
        router = Router(policy)
        first = await router.turn(asks("a.png"))
        assert first.p_bodies[0]["messages"] == first.d_body["messages"] == asks("a.png")["messages"]
        assert handle_sent(await router.turn(asks("b.png", *following))) is None
        assert handle_sent(await router.turn(asks("a.png", *following)))


def test_fr83_reads_that_fail_stop_the_use_of_that_engine() -> None:
    clock = Clock()
    judge = NodeJudge(Pool([D1], clock), Forms(), CostModel(), Breaker(failures=5, window=60.0), clock)
    for _ in range(5):
        drive = Drive(NEXT, [found(d_handle()), p_error(500), p_reply(node=P2)], CONNECTOR, judge=judge)  # type: ignore[arg-type]
        assert drive.facts.outcome == Outcome.READ_FAILED
        clock.now += 10
    sixth = Drive(NEXT, [found(d_handle()), p_reply()], CONNECTOR, judge=judge)  # type: ignore[arg-type]
    assert sixth.facts.outcome == Outcome.BREAKER_OPEN
    assert sixth.carried == [COLD]


def test_fr84_counts_are_never_corrected_upward() -> None:
    handle = d_handle(1023)
    assert len(handle["remote_block_ids"][0]) == 64
    raw = read_handle(compact(handle)).raw
    assert raw == compact(handle)
    drive = Drive(NEXT, [found(d_handle(1023, proof=False)), p_reply()], TRUSTED)
    assert (drive.carried[0]["remote_num_tokens"], len(drive.carried[0]["remote_block_ids"][0])) == (1023, 64)


EVIL = {"remote_host": "evil", "prompt_token_ids": [1]}


@pytest.mark.parametrize(
    "more",
    [
        {"kv_transfer_params": EVIL},
        {"ec_transfer_params": EVIL},
        {"vllm_xargs": {"kv_transfer_params": EVIL}},
        {"extra_args": {"kv_transfer_params": EVIL}},
        {"sampling_params": {"extra_args": {"kv_transfer_params": EVIL}}},
        {"extra_body": {"kv_transfer_params": EVIL}},
        {"metadata": {"kv_transfer_params": EVIL}},
    ],
)
def test_fr85_no_place_takes_a_clients_parameters_to_a_node(more: Json) -> None:
    for replies in ([p_reply()], [p_error(500), p_error(500)]):
        drive = Drive(FIRST | more, [Taken(), *replies])
        assert isinstance(drive.decision, Forward)
        assert b"evil" not in b"".join([drive.decision.body, *(a.body for a in drive.asks)])


def test_fr89_d_gets_the_clients_messages_unchanged() -> None:
    body: dict[str, Any] = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "\u2028é"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": 1.50}}}],
    }
    d_body = Drive(body).d_body
    assert {k: d_body[k] for k in body} == body
    assert P1 not in json.dumps(d_body["messages"])


@pytest.mark.parametrize("held", [160, 159, 145])
def test_090_no_form_says_that_d_holds_more_than_it_does(held: int) -> None:
    """A full hit is for vLLM to make of the count: D's own is passed on, or a lower one."""
    handle = read_handle(compact(d_handle(held)))
    carried = json.loads(sealed(handle))["kvreturn"]["handle"]
    assert carried["remote_num_tokens"] == json.loads(direct(handle))["remote_num_tokens"] == held
    for proven in (held + 1, held, 128):
        clip = json.loads(clipped(handle, proven))
        assert clip["remote_num_tokens"] == min(held, proven)
        assert len(clip["remote_block_ids"][0]) == -(-min(held, proven) // 16)
