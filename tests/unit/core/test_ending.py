"""What a turn leaves for an eager return: just the tokens that D holds, from whoever can tell them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from kvreturn.core.api import API, Chat, Completions, Messages
from kvreturn.core.policy import Policy
from kvreturn.core.ports import Failure, Put, Reply, Result, Taken
from support.turns import D1, P1, Drive, Json, answered, compact, d_handle, found, p_error, p_reply, p_silent, request

EAGER = Policy(proof="connector", returns="eager")
STOCK = Policy(proof="off", returns="eager")
IDS = list(range(1, 151))
GENERATED = list(range(151, 162))
ASK: Json = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
TEXT: Json = {"model": "m", "prompt": "x" * 300}
SAID: Json = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": "Hi"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 150, "output_tokens": 11},
}


def own_handle() -> Json:
    handle = d_handle([*IDS, *GENERATED[:10]])
    handle["kvreturn"]["generated"] = GENERATED
    return handle


def completed(**more: object) -> Json:
    return {"choices": [{"index": 0, "text": "Hi", "finish_reason": "stop", **more}]}


def p_with(report: Json | None = None, *, choice: bool = False) -> Reply:
    """P's answer with the prompt's ids, where vLLM has them: beside the choices (chat) or in them."""
    reply = p_reply(report)
    body = json.loads(reply.body)
    (body["choices"][0] if choice else body)["prompt_token_ids"] = IDS
    return replace(reply, body=compact(body))


@dataclass
class Case:
    """One turn, and what D answers."""

    reply: Reply
    answer: Json
    body: Json = field(default_factory=lambda: request("Hello"))
    api: API = field(default_factory=Chat)
    policy: Policy = EAGER
    taken: Taken = field(default_factory=Taken)
    more: Sequence[Reply] = ()

    def play(self) -> tuple[Drive, Put]:
        drive = Drive(self.body, [self.taken, self.reply, *self.more], self.policy, self.api)
        put, _, _ = drive.respond(self.answer)
        assert put
        return drive, put


KNOWN = {
    "chat: P told, D's handle has the rest": Case(p_with({}), answered("Hi", own_handle())),
    "completions: the same": Case(
        p_with({}, choice=True), completed() | {"kv_transfer_params": own_handle()}, TEXT, Completions()
    ),
    "messages: P's report tells": Case(
        p_reply({"ids": IDS}), SAID | {"kv_transfer_params": own_handle()}, ASK, Messages()
    ),
}


@pytest.mark.parametrize("case", KNOWN.values(), ids=KNOWN)
def test_the_tokens_that_go_back_are_ds(case: Case) -> None:
    drive, put = case.play()
    assert put.job
    assert put.job.tokens() == [*IDS, *GENERATED]
    assert (put.job.prefill_node, put.job.decode_node) == (P1, D1)
    assert (put.job.finish_reason, put.job.gap, put.job.turns) == ("end_turn" if case.body is ASK else "stop", None, 1)
    assert json.loads(put.job.kept) == {"model": "m"}
    assert "ids" not in drive.d_body["kv_transfer_params"]["kvreturn"]


@pytest.mark.parametrize("asked", [False, True], ids=["for the client", "by the client"])
def test_a_stock_ds_own_ids_are_taken(*, asked: bool) -> None:
    handle = {k: v for k, v in own_handle().items() if k != "kvreturn"}
    answer = answered("Hi", handle) | {"prompt_token_ids": IDS}
    answer["choices"][0]["token_ids"] = GENERATED
    body = request("Hello", **({"return_token_ids": True} if asked else {}))
    drive = Drive(body, [Taken(), p_reply()], STOCK)
    assert drive.d_body["return_token_ids"] is True
    put, out, _ = drive.respond(answer)
    assert put
    assert put.job
    assert put.job.tokens() == [*IDS, *GENERATED]
    client = json.loads(out)
    assert client["prompt_token_ids"] == (IDS if asked else None)
    assert client["choices"][0]["token_ids"] == (GENERATED if asked else None)


@pytest.mark.parametrize(
    ("policy", "body"),
    [
        (EAGER, request("Hello")),  # our connector on D tells what it generated
        (STOCK, request("Hello", stream=True)),  # a stock D's streams bring no handle
        (STOCK, request("Hello", return_token_ids=False)),  # the client said no
        (STOCK, request("Hello", n=2)),
        (Policy(proof="off"), request("Hello")),
    ],
)
def test_d_is_not_asked_for_ids_where_they_are_of_no_use(policy: Policy, body: Json) -> None:
    results: list[Result] = [Taken(), p_reply()] if policy.remembers else [p_reply()]
    assert Drive(body, results, policy).d_body.get("return_token_ids") == body.get("return_token_ids")


def test_an_answer_to_an_earlier_one_says_how_long_that_took() -> None:
    taken = found(d_handle(), age=12.5)
    _, put = Case(p_with({}), answered("Hi", own_handle()), request("Hello", "Hi", "And?"), taken=taken).play()
    assert put.job
    assert (put.job.gap, put.job.turns, put.record.turns) == (12.5, 2, 2)


NOTHING = {
    "lazy": Case(p_with({}), answered("Hi", own_handle()), policy=Policy(proof="connector")),
    "P does not tell": Case(p_reply({}), answered("Hi", own_handle())),
    "D does not tell": Case(p_with({}), answered("Hi", d_handle(160, proof=False))),
    "too few": Case(p_with({}), answered("Hi", d_handle(48))),
    "no P": Case(p_silent(Failure.CONNECT), answered("Hi", own_handle()), more=[p_error(500)]),
    "no handle": Case(p_with({}), answered("Hi")),
    "several choices": Case(p_with({}), answered("Hi", own_handle()), request("Hello", n=2)),
    "an image": Case(
        p_with({}),
        answered("Hi", own_handle()),
        {
            "model": "m",
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
        },
    ),
}


@pytest.mark.parametrize("case", NOTHING.values(), ids=NOTHING)
def test_what_cannot_go_back_or_must_not_stays_lazy(case: Case) -> None:
    assert case.play()[1].job is None
