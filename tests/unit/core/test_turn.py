import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvreturn.core.api import API, APIS, Completions, Responses
from kvreturn.core.jsontext import ObjectText
from kvreturn.core.outcome import Outcome
from kvreturn.core.policy import Policy
from kvreturn.core.ports import Ask, Awaited, Failure, Forward, Put, Record, Refuse, Reply, Take, Taken
from kvreturn.core.turn import Turn
from support.turns import (
    COLD,
    D1,
    D2,
    P1,
    P2,
    Drive,
    Json,
    Judge,
    answered,
    compact,
    d_handle,
    found,
    p_error,
    p_params,
    p_reply,
    p_silent,
    request,
    tokenized,
)

FIRST = request("Hello")
NEXT = request("Hello", "Hi", "And now?")
CONNECTOR, ROUTER, TRUSTED, OFF = (Policy(proof=p) for p in ("connector", "router", "trusted", "off"))
HELD = list(range(1, 161))
LONGER = [*HELD, *range(500, 540)]  # the 200 tokens that `p_reply` counts


# --- the outcome of a turn, as a table ---

OUTCOMES: list[tuple[str, Drive, Outcome, str | None]] = []


def case(name: str, outcome: Outcome, drive: Drive, detail: str | None = None) -> None:
    OUTCOMES.append((name, drive, outcome, detail))


def connector(taken: Taken, *replies: Reply, **more: Any) -> Drive:  # noqa: ANN401 - fields of Drive
    return Drive(NEXT, [taken, *(replies or [p_reply({})])], CONNECTOR, **more)


def reported(report: Json, handle: Json | None = None) -> Drive:
    return connector(found(handle or d_handle()), p_reply(report))


case("the first turn", Outcome.FIRST_TURN, Drive(FIRST))
case("an answer in it, but nothing known", Outcome.NOT_A_CONTINUATION, Drive(NEXT))
case("all read", Outcome.HIT, reported({"proven": 160, "read": 160}))
case("more proven than held", Outcome.HIT, reported({"proven": 161, "read": 160}))
case(
    "some local, the rest read",
    Outcome.HIT,
    reported({"proven": 160, "read": 96, "local": 64, "reason": "local_hit"}),
    "local_hit",
)
case("a prefix read", Outcome.PARTIAL_HIT, reported({"proven": 96, "read": 96}))
case("all local", Outcome.LOCAL_HIT, reported({"proven": 160, "local": 160, "reason": "local_hit"}), "local_hit")
case(
    "below P's threshold",
    Outcome.BELOW_THRESHOLD,
    reported({"proven": 160, "local": 128, "reason": "below_threshold"}),
    "below_threshold",
)
case("not even one block", Outcome.NOT_A_CONTINUATION, reported({"reason": "not_a_continuation"}), "not_a_continuation")
case("P found it expired", Outcome.EXPIRED, reported({"proven": 160, "reason": "expired"}), "expired")
case("P cannot reach D", Outcome.NODE_GONE, reported({"proven": 160, "reason": "node_gone"}), "node_gone")
case("P used it before", Outcome.NODE_GONE, reported({"proven": 160, "reason": "used"}), "used")
case("P's read failed", Outcome.READ_FAILED, reported({"proven": 160, "reason": "read_failed"}), "read_failed")


def returned(report: Json | None, *, pending: Awaited | None = None, **more: Any) -> Drive:  # noqa: ANN401 - of `p_reply`
    """600 of the 1,000 tokens that went back were the prompt's."""
    record = Record(3600.0, None, None, D1, P1, prompt=600, turns=2, returned=1_000, pending=pending is not None)
    waits = [pending] if pending else []
    return Drive(NEXT, [Taken(record, None, 700.0, b"ticket"), *waits, p_reply(report, **more)], CONNECTOR)


case("all that went back is there", Outcome.HIT, returned({"local": 992}))
case("the end of it is in no whole block", Outcome.HIT, returned({"local": 896}))
case("the answer is another one now", Outcome.PARTIAL_HIT, returned({"local": 640}))
case("the prompt, but for its last block", Outcome.PARTIAL_HIT, returned({"local": 512}))
case("the prompt is not all there", Outcome.EVICTED, returned({"local": 320}))
case("nothing is there any more", Outcome.EVICTED, returned({"local": 0}), "all")
case("a stock P tells what it had", Outcome.HIT, returned(None, remote_prefill_cached_tokens=992))
case("a stock P does not tell", Outcome.RETURNED, returned(None, remote_prefill_cached_tokens=None))
case("the P that has it is gone", Outcome.NODE_GONE, returned({"local": 0}, node=P2), "prefill_node")
case("waited for", Outcome.HIT, returned({"local": 992}, pending=Awaited()))
case("not waited for any longer", Outcome.RETURN_FAILED, returned({"local": 0}, pending=Awaited("late")), "late")
case("arrived, by another router", Outcome.HIT, returned({"local": 992}, pending=Awaited(elsewhere=True)))
case(
    "left by a router that died",
    Outcome.RETURN_FAILED,
    returned({"local": 320}, pending=Awaited(elsewhere=True)),
    "unfinished",
)
case(
    "another router's, of which nobody knows whether it arrived",
    Outcome.RETURN_FAILED,
    returned(None, remote_prefill_cached_tokens=None, pending=Awaited(elsewhere=True)),
    "unfinished",
)
case("did not arrive", Outcome.RETURN_FAILED, connector(found(None, reason=Outcome.RETURN_FAILED)))
case("slower than computing", Outcome.SLOWER, connector(found(d_handle()), judge=Judge(Outcome.SLOWER)))
case("P wants another MAC", Outcome.UNPROVEN, reported({"reason": "mac"}), "mac")
case("P has another scope", Outcome.UNPROVEN, reported({"reason": "scope"}), "scope")
case("a reason nobody knows", Outcome.UNPROVEN, reported({"reason": "new_reason"}), "new_reason")
case("nothing read, no reason", Outcome.UNPROVEN, reported({"proven": 160}))
case("a stock P", Outcome.UNPROVEN, connector(found(d_handle()), p_reply()), "no_report")
case("a P of another version", Outcome.UNPROVEN, reported({"v": 2}), "no_report")
case("a stock D", Outcome.UNPROVEN, connector(found(d_handle(proof=False))), "no_digests")
case("a D of another version", Outcome.UNPROVEN, connector(found(d_handle(kvreturn={"v": 2}))), "no_digests")
case("no handle in the store", Outcome.UNPROVEN, connector(found(b'{"a":1}')), "malformed")
case("no JSON in the store", Outcome.UNPROVEN, connector(found(b"\xff")), "malformed")
case("too few tokens", Outcome.BELOW_THRESHOLD, connector(found(d_handle(63))))
case("just enough tokens", Outcome.HIT, connector(found(d_handle(64)), p_reply({"proven": 64, "read": 64})))
case("the breaker is open", Outcome.BREAKER_OPEN, connector(found(d_handle()), judge=Judge(Outcome.BREAKER_OPEN)))
case("D left the pool", Outcome.NODE_GONE, connector(found(d_handle()), judge=Judge(Outcome.NODE_GONE)))
case("expired", Outcome.EXPIRED, connector(Taken(None, Outcome.EXPIRED)))
case("the tenant had too many", Outcome.OVER_LIMIT, connector(Taken(None, Outcome.OVER_LIMIT)))
case("already taken", Outcome.ALREADY_TAKEN, connector(Taken(None, Outcome.ALREADY_TAKEN)))
case("the store is down", Outcome.STORE_UNAVAILABLE, connector(Taken(None, Outcome.STORE_UNAVAILABLE)))
case(
    "the store is down on a first turn",
    Outcome.STORE_UNAVAILABLE,
    Drive(FIRST, [Taken(None, Outcome.STORE_UNAVAILABLE), p_reply()]),
)
case("D gave none", Outcome.NO_HANDLE_FROM_DECODE, connector(found(None, reason=Outcome.NO_HANDLE_FROM_DECODE)))
case(
    "D gave one for several choices", Outcome.MULTIPLE_CHOICES, connector(found(None, reason=Outcome.MULTIPLE_CHOICES))
)
case("switched off", Outcome.DISABLED, Drive(NEXT, [p_reply()], OFF))
case("P failed with it", Outcome.READ_FAILED, connector(found(d_handle()), p_error(500), p_reply()), "500")
case(
    "P was silent with it",
    Outcome.READ_FAILED,
    connector(found(d_handle()), p_silent(Failure.TIMEOUT), p_reply()),
    "timeout",
)
case(
    "P gave nothing for D with it",
    Outcome.READ_FAILED,
    connector(found(d_handle()), p_error(200), p_reply()),
    "no_kv_transfer_params",
)
case("P failed twice", Outcome.PREFILL_FAILED, connector(Taken(), p_error(500), p_error(503)), "503")
case(
    "no P at all",
    Outcome.PREFILL_FAILED,
    connector(Taken(), p_silent(Failure.CONNECT, None), p_silent(Failure.CONNECT, None)),
    "connect",
)
case("P refused the request", Outcome.REJECTED, connector(found(d_handle()), p_error(400)))
case("P refused it the second time", Outcome.REJECTED, connector(Taken(), p_error(500), p_error(400)))
case("no request at all", Outcome.REJECTED, Drive(b"[]", []))


def by_router(handle: Json, *replies: Reply, **more: Any) -> Drive:  # noqa: ANN401 - JSON
    return Drive({**NEXT, **more}, [found(handle), *replies], ROUTER)


case("router: all proven", Outcome.HIT, by_router(d_handle(), tokenized(LONGER), p_reply()))
case(
    "router: a prefix proven",
    Outcome.PARTIAL_HIT,
    by_router(d_handle(), tokenized([*HELD[:100], *range(900, 1000)]), p_reply()),
)
case(
    "router: shorter prompt",
    Outcome.PARTIAL_HIT,
    by_router(d_handle(), tokenized(HELD[:100]), p_reply(prompt_tokens=100)),
)
case(
    "router: another prompt", Outcome.NOT_A_CONTINUATION, by_router(d_handle(), tokenized(range(900, 1100)), p_reply())
)
case(
    "router: too little proven",
    Outcome.BELOW_THRESHOLD,
    by_router(d_handle(), tokenized([*HELD[:63], *range(900, 1037)]), p_reply()),
)
case(
    "router: no digests", Outcome.UNPROVEN, by_router(d_handle(proof=False), tokenized(LONGER), p_reply()), "no_digests"
)
case("router: P cannot tokenize", Outcome.UNPROVEN, by_router(d_handle(), p_error(404), p_reply()), "tokenize_failed")
case(
    "router: P is silent",
    Outcome.UNPROVEN,
    by_router(d_handle(), p_silent(Failure.TIMEOUT), p_reply()),
    "tokenize_failed",
)
case("router: not tokenizable", Outcome.UNPROVEN, by_router(d_handle(), p_reply(), documents=[]), "not_tokenizable")
case(
    "router: another salt",
    Outcome.UNPROVEN,
    by_router(d_handle(salt="a"), tokenized(LONGER), p_reply(), cache_salt="b"),
    "scope",
)
case("router: the same salt", Outcome.HIT, by_router(d_handle(salt="a"), tokenized(LONGER), p_reply(), cache_salt="a"))
case(
    "router: several groups",
    Outcome.UNPROVEN,
    by_router(d_handle(remote_block_ids=[[1], [2]]), tokenized(LONGER), p_reply()),
    "groups",
)
case(
    "router: P counted another prompt",
    Outcome.UNPROVEN,
    by_router(d_handle(), tokenized(LONGER), p_reply(prompt_tokens=201)),
    "tokenize_mismatch",
)
case(
    "what it begins with is stored at D",
    Outcome.DECODE_ALONE,
    Drive({"model": "m", "input": "Hi", "previous_response_id": "resp_1"}, [], api=Responses()),
    "previous_response_id",
)
case("trusted", Outcome.HIT, Drive(NEXT, [found(d_handle(proof=False)), p_reply()], TRUSTED))


@pytest.mark.parametrize(("drive", "outcome", "detail"), [c[1:] for c in OUTCOMES], ids=[c[0] for c in OUTCOMES])
def test_outcomes(drive: Drive, outcome: Outcome, detail: str | None) -> None:
    assert (drive.facts.outcome, drive.facts.detail) == (outcome, detail)


def test_the_table_reaches_every_outcome() -> None:
    # `cancelled` is the client's doing: whoever drives the turn says so. `foreign_handle` is of legs (test_legs.py).
    assert {c[2] for c in OUTCOMES} == set(Outcome) - {Outcome.CANCELLED, Outcome.FOREIGN_HANDLE}


# --- the P leg ---


def test_a_first_turn_goes_cold_to_p_and_ps_parameters_to_d() -> None:
    drive = Drive(FIRST | {"stream": True})
    assert [type(e) for e in drive.effects] == [Take, Ask]
    assert drive.carried == [COLD]
    assert drive.asks[0].path == "/v1/chat/completions"
    assert drive.d_body == FIRST | {"stream": True, "kv_transfer_params": p_params()}
    assert drive.judge.succeeded == []


def with_ids(report: Json | None = None) -> Reply:
    reply = p_reply(report)
    return replace(reply, body=compact(json.loads(reply.body) | {"prompt_token_ids": [1, 89, 643]}))


def test_d_gets_the_token_ids_that_p_rendered() -> None:
    drive = Drive(FIRST, [Taken(), with_ids()])
    assert drive.p_bodies[0]["return_token_ids"] is True
    assert drive.d_body == FIRST | {"kv_transfer_params": p_params() | {"prompt_token_ids": [1, 89, 643]}}


IMAGE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/a.png"}}]}]}


@pytest.mark.parametrize(
    "drive",
    [
        pytest.param(Drive(FIRST | IMAGE), id="media: vLLM would ignore them"),
        pytest.param(Drive({"model": "m", "prompt": "Hi"}, api=Completions()), id="completions: vLLM knows none there"),
        pytest.param(Drive(FIRST, policy=replace(CONNECTOR, pass_token_ids=False)), id="switched off"),
    ],
)
def test_p_is_not_asked_for_token_ids_that_d_would_not_take(drive: Drive) -> None:
    assert "return_token_ids" not in drive.p_bodies[0]


def test_the_clients_own_wish_for_token_ids_stays_with_d() -> None:
    drive = Drive(FIRST | {"return_token_ids": False}, [Taken(), with_ids()])
    assert drive.p_bodies[0]["return_token_ids"] is True
    assert drive.d_body["return_token_ids"] is False


@pytest.mark.parametrize("report", [None, {"proven": 0, "read": 0, "local": 32, "prompt": "0123456789abcdef"}])
@pytest.mark.parametrize(("body", "policy"), [(FIRST, OFF), (FIRST | {"n": 2}, CONNECTOR)], ids=["off", "n=2"])
def test_d_is_told_to_keep_nothing_that_will_not_be_wanted(body: Json, policy: Policy, report: Json | None) -> None:
    replies: list[Taken | Reply] = [p_reply(report)] if policy is OFF else [Taken(), p_reply(report)]
    drive = Drive(body, replies, policy)
    assert drive.d_body["kv_transfer_params"] == p_params() | {"kvreturn": {"v": 1, **(report or {}), "keep": False}}


def test_with_the_connector_p_gets_the_handle_sealed() -> None:
    handle = d_handle()
    drive = reported({"proven": 160, "read": 160}, handle)
    assert drive.carried == [COLD | {"kvreturn": {"v": 1, "handle": handle}}]
    assert drive.judge.succeeded == ["9b1f-d"]
    facts = drive.facts
    assert (facts.held, facts.proven, facts.read, facts.local, facts.handle_age) == (160, 160, 160, 0, 3.5)
    assert facts.prefill.prompt == 200


def test_a_stock_p_is_told_nothing_that_it_could_read_with() -> None:
    # Who runs on P is not known: everything that a stock P looks at must be as in a cold request.
    drive = connector(found(d_handle()), p_reply())
    (params,) = drive.carried
    assert {k: v for k, v in params.items() if k != "kvreturn"} == COLD


def test_when_trusted_p_gets_the_published_form() -> None:
    handle = d_handle(proof=False, x_future={"a": [1]})
    drive = Drive(NEXT, [found(handle), p_reply()], TRUSTED)
    assert drive.carried == [handle | {"do_remote_decode": True, "do_remote_prefill": False}]
    assert (drive.facts.held, drive.facts.proven, drive.facts.read) == (160, 160, None)


@pytest.mark.parametrize(
    ("tokens", "count", "blocks"),
    [(LONGER, 160, 10), ([*HELD[:100], *range(900, 1000)], 96, 6), ([*HELD[:159], *range(900, 941)], 144, 9)],
)
def test_proof_by_the_router_clips_the_handle_to_what_is_proven(tokens: list[int], count: int, blocks: int) -> None:
    drive = by_router(d_handle(), tokenized(tokens, P2), p_reply(node=P2))
    assert json.loads(drive.asks[0].body) == {"model": "m", "messages": NEXT["messages"]}
    (params,) = drive.carried
    expected = d_handle(proof=False, remote_num_tokens=count, remote_block_ids=[list(range(1, blocks + 1))])
    assert params == expected | {"do_remote_decode": True, "do_remote_prefill": False}
    assert (drive.facts.held, drive.facts.proven) == (160, count)
    assert (drive.asks[0].prefer, drive.asks[1].prefer) == (P1, P2)


@pytest.mark.parametrize("more", [{}, {"cache_salt": "s", "priority": 2}])
def test_p_gets_just_the_tokens_that_were_proven_and_so_does_d(more: Json) -> None:
    # Were P to render the messages again, the time of day in a template could have changed since `/tokenize`.
    body = {**NEXT, **more, "max_tokens": 50, "stream": True, "stop": ["x"]}
    handle = d_handle(salt=more.get("cache_salt", ""))
    drive = Drive(body, [found(handle), tokenized(LONGER), p_reply()], ROUTER)
    assert [a.path for a in drive.asks] == ["/tokenize", "/v1/completions"]
    assert drive.p_bodies == [
        {
            "model": "m",
            **more,
            "prompt": LONGER,
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": drive.carried[0],
        }
    ]
    assert drive.d_body.pop("kv_transfer_params") == {**p_params(), "prompt_token_ids": LONGER}
    told_nothing = Drive(body, [found(handle), tokenized(LONGER), p_reply()], replace(ROUTER, pass_token_ids=False))
    assert told_nothing.d_body["kv_transfer_params"] == p_params()


def test_a_p_with_the_connector_says_itself_what_it_read() -> None:
    # It got a handle without digests, and reads nothing that it cannot prove.
    drive = by_router(d_handle(), tokenized(LONGER), p_reply({"reason": "no_digests"}))
    assert (drive.facts.outcome, drive.facts.detail, drive.facts.read) == (Outcome.UNPROVEN, "no_digests", 0)


def test_what_p_has_against_the_tokens_is_not_told_to_a_client_who_sent_messages() -> None:
    drive = by_router(d_handle(), tokenized(LONGER), p_error(404), p_reply())
    assert [a.path for a in drive.asks] == ["/tokenize", "/v1/completions", "/v1/chat/completions"]
    assert isinstance(drive.decision, Forward)
    assert (drive.facts.outcome, drive.facts.detail) == (Outcome.READ_FAILED, "404")
    assert drive.carried[1] == COLD
    assert drive.judge.failed == []  # D is not to blame
    again = by_router(d_handle(), tokenized(LONGER), p_error(400), p_error(400, body=b"too long"))
    assert again.decision == Refuse(400, b"too long")
    assert again.facts.outcome == Outcome.REJECTED


def test_token_ids_from_the_client_need_no_tokenizing() -> None:
    body = {"model": "m", "prompt": LONGER}
    drive = Drive(body, [found(d_handle()), p_reply()], ROUTER, Completions())
    assert drive.facts.outcome == Outcome.HIT
    assert [a.path for a in drive.asks] == ["/v1/completions"]


def test_token_ids_that_p_will_cut_prove_nothing() -> None:
    body = {"model": "m", "prompt": LONGER, "truncate_prompt_tokens": 100}
    drive = Drive(body, [found(d_handle()), p_reply()], ROUTER, Completions())
    assert (drive.facts.outcome, drive.facts.detail) == (Outcome.UNPROVEN, "not_tokenizable")
    assert drive.carried == [COLD]


def test_a_prompt_that_p_counted_otherwise_is_left_to_d_alone() -> None:
    # The blocks that P read belong to another prompt than the one it has: D must not get them.
    drive = by_router(d_handle(), tokenized(LONGER), p_reply(prompt_tokens=201))
    assert drive.d_body == NEXT
    assert drive.facts.fallback


def test_a_count_that_p_does_not_tell_is_no_mismatch() -> None:
    reply = Reply(P1, 200, compact({"kv_transfer_params": p_params()}))
    assert by_router(d_handle(), tokenized(LONGER), reply).facts.outcome == Outcome.HIT


UNSAFE = [pytest.param(drive, id=name) for name, drive, o, _ in OUTCOMES if o not in {Outcome.HIT, Outcome.PARTIAL_HIT}]


@pytest.mark.parametrize("drive", UNSAFE)
def test_without_proof_nothing_that_p_could_read_with_is_sent_in_the_published_form(drive: Drive) -> None:
    if drive.facts.detail == "tokenize_mismatch":
        return  # what `/tokenize` said was proof, until P counted
    for params in drive.carried:
        assert {k: v for k, v in params.items() if k != "kvreturn"} == COLD


def test_off_asks_the_store_nothing() -> None:
    drive = Drive(NEXT, [p_reply()], OFF)
    assert [type(e) for e in drive.effects] == [Ask]
    assert drive.carried == [COLD]


def test_where_p_and_d_were_before_they_are_preferred_again() -> None:
    drive = reported({"proven": 160, "read": 160})
    assert drive.asks[0].prefer == P1
    assert isinstance(drive.decision, Forward)
    assert drive.decision.decode_node == D1
    gone = connector(found(None, reason=Outcome.NO_HANDLE_FROM_DECODE, node=D2))
    assert isinstance(gone.decision, Forward)
    assert gone.decision.decode_node == D2
    assert Drive(FIRST).asks[0].prefer is None


def test_the_policy_is_that_of_the_requests_model() -> None:
    asked = []

    def policy(model: str) -> Policy:
        asked.append(model)
        return OFF

    turn = Turn(Drive(FIRST).api, Drive(FIRST).scope, policy, Judge())
    next(turn.request(compact({**FIRST, "model": "special"})))
    assert asked == ["special"]


# --- failures of P ---

SILENT = p_silent(Failure.CONNECT)
FAILURES = {
    "500": p_error(500),
    "503": p_error(503),
    "connect": SILENT,
    "timeout": p_silent(Failure.TIMEOUT),
    "malformed": p_error(200, body=b"<html>"),
    "no_kv_transfer_params": p_error(200),
}


@pytest.mark.parametrize(("reason", "failure"), FAILURES.items(), ids=FAILURES)
@pytest.mark.parametrize("taken", [Taken(), found(d_handle())], ids=["cold", "with a handle"])
def test_a_p_that_fails_is_asked_once_more_cold_and_elsewhere(reason: str, failure: Reply, taken: Taken) -> None:
    drive = connector(taken, failure, p_reply(node=P2))
    assert [(a.avoid, a.last) for a in drive.asks] == [(None, False), (P1, True)]
    assert drive.asks[1].prefer is None
    assert drive.carried[1] == COLD
    assert drive.facts.retries == 1
    assert drive.turn.prefill_node == P2
    assert drive.d_body == NEXT | {"kv_transfer_params": p_params()}
    if taken.record:
        assert (drive.facts.outcome, drive.facts.detail) == (Outcome.READ_FAILED, reason)
    else:
        assert drive.facts.outcome == Outcome.NOT_A_CONTINUATION


@pytest.mark.parametrize(("reason", "failure"), FAILURES.items(), ids=FAILURES)
@pytest.mark.parametrize("policy", [CONNECTOR, ROUTER, TRUSTED, OFF], ids=lambda p: p.proof)
def test_fr73_a_p_that_fails_twice_is_left_out_by_policy(reason: str, failure: Reply, policy: Policy) -> None:
    results: list[Taken | Reply] = [failure, failure] if policy is OFF else [Taken(), failure, failure]
    drive = Drive(NEXT, results, policy)
    assert drive.d_body == NEXT
    assert (drive.facts.outcome, drive.facts.detail) == (Outcome.PREFILL_FAILED, reason)
    assert (drive.facts.fallback, drive.facts.retries, drive.turn.prefill_node) == (True, 1, None)


@pytest.mark.parametrize(("reason", "failure"), FAILURES.items(), ids=FAILURES)
def test_fr73_or_the_client_is_told_by_policy(reason: str, failure: Reply) -> None:
    drive = Drive(NEXT, [Taken(), failure, failure], replace(CONNECTOR, fallback=False))
    assert isinstance(drive.decision, Refuse)
    status = 504 if reason == "timeout" else 502
    assert drive.decision.status == status
    error = json.loads(drive.decision.body)["error"]
    assert error["code"] == status
    assert f"({reason})" in error["message"]
    assert not drive.facts.fallback


def test_fr83_only_failures_that_the_handle_may_have_caused_count_against_its_engine() -> None:
    for taken, replies, counted in [
        (found(d_handle()), [p_error(500), p_reply()], 1),
        (found(d_handle()), [p_silent(Failure.TIMEOUT), p_reply()], 1),
        (found(d_handle()), [SILENT, p_reply()], 0),
        (found(d_handle()), [p_error(400)], 0),
        (Taken(), [p_error(500), p_reply()], 0),
    ]:
        drive = connector(taken, *replies)
        assert drive.effects
        assert (drive.judge.failed, drive.judge.succeeded) == (["9b1f-d"] * counted, [])


def test_a_4xx_of_p_goes_to_the_client_as_it_is() -> None:
    body = b'{"error":{"message":"too long","code":400}}'
    for replies in ([p_error(400, body=body)], [p_error(500), p_error(422, body=body)]):
        drive = connector(found(d_handle()), *replies)
        assert drive.decision == Refuse(replies[-1].status, body)
        assert len(drive.asks) == len(replies)


# --- requests that are none ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not a JSON object"),
        (b"[]", "the body is not a JSON object"),
        (b'{"messages":[]', "not JSON"),
        (b"{}", "`messages` must be a list"),
        (b'{"model":5,"messages":[{"role":"user"}]}', "`model` must be a string"),
        (b'{"messages":[{"role":"user"}],"n":' + b"9" * 5000 + b"}", "`n`"),
        (
            b'{"metadata":' + b"[" * 700 + b'{"kv_transfer_params":1}' + b"]" * 700 + b',"messages":[{"role":"user"}]}',
            "too deeply",
        ),
        (b'{"messages":' + b"[" * 100_000, "nested too deeply"),
        (b'\xff{"messages":[{"role":"user"}]}', "not JSON"),
    ],
)
def test_a_request_that_is_none_is_answered_400(body: bytes, message: str) -> None:
    drive = Drive(body, [])
    assert isinstance(drive.decision, Refuse)
    assert drive.decision.status == 400
    error = json.loads(drive.decision.body)["error"]
    assert error["message"].startswith("kvreturn: ")
    assert message in error["message"]
    put, _, _ = drive.respond(answered("Hi", d_handle()))
    assert put is None


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("proof", ["connector", "trusted"])
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_no_depth_of_nesting_is_more_than_a_refusal(api: API, opening: bytes, proof: Any) -> None:  # noqa: ANN401 - a literal
    closing = b"]" if opening == b"[" else b"}"
    core = b"" if opening == b"[" else b"1"
    plain = {"messages": [{"role": "user"}], "input": "x", "prompt": "x"}
    for name in ("messages", "input", "tools"):
        for depth in [*range(450, 520), *range(850, 1010), 3000]:
            deep = opening * depth + core + closing * depth
            value = b'[{"role":"user","content":%b}]' % deep if name == "messages" else deep
            steps = Turn(api, Drive(FIRST).scope, lambda _: Policy(proof=proof), Judge()).request(
                ObjectText(compact(plain)).edit(put={name: value})
            )
            try:
                assert isinstance(next(steps), Take)
                assert isinstance(steps.send(Taken()), Ask)
                steps.send(p_reply())
            except StopIteration as stop:  # either is right, depending on the interpreter's limit
                assert isinstance(stop.value, Forward) or stop.value.status == 400  # noqa: PT017


def test_fr85_nothing_that_a_client_says_of_transfers_reaches_a_node() -> None:
    evil = {"remote_host": "evil", "remote_engine_id": "evil"}
    body = NEXT | {"kv_transfer_params": evil, "ec_transfer_params": evil, "vllm_xargs": {"kv_transfer_params": evil}}
    drive = Drive(body, [found(d_handle()), tokenized(LONGER), p_reply()], ROUTER)
    assert isinstance(drive.decision, Forward)
    assert b"evil" not in b"".join(a.body for a in drive.asks) + drive.decision.body
    fallback = Drive(body, [Taken(), SILENT, SILENT])
    assert fallback.d_body == NEXT | {"vllm_xargs": {}}


def test_fr89_all_that_d_gets_is_what_the_client_sent() -> None:
    raw = b'{"model" : "m","messages":[ {"role":"user","content":"\\u00e9 1.50"} ] ,"n": 1, "temperature":1.0e-1}'
    drive = Drive(raw)
    assert isinstance(drive.decision, Forward)
    assert drive.decision.body == raw[:-1] + b',"kv_transfer_params":' + compact(p_params()) + b"}"


# --- the response ---


def test_a_turn_is_stored_under_its_whole_and_under_its_prompt() -> None:
    drive = Drive(FIRST)
    handle = d_handle()
    put, out, _ = drive.respond(answered("Hi", handle))
    assert json.loads(out) == answered("Hi")
    assert put
    assert put.record == Record(450.0, compact(handle), None, D1, P1, prompt=200)
    assert drive.facts.captured
    following, edited = Drive(NEXT).keys, Drive(request("Hello", "Hi!", "And now?")).keys
    assert put.keys[0] in following
    assert put.keys[0] not in edited
    assert put.keys[1] in following
    assert put.keys[1] in edited
    assert following.index(put.keys[0]) < following.index(put.keys[1])


@pytest.mark.parametrize(
    ("policy", "ttl", "expected"),
    [
        (450.0, 480.0, 450.0),
        (450.0, 300.0, 290.0),
        (450.0, 11.0, 1.0),
        (100.0, 480.0, 100.0),
        (470.0, 480.0, 470.0),
        (475.0, 480.0, 470.0),
    ],
)
def test_fr55_the_ttl_ends_before_ds_own(policy: float, ttl: float, expected: float) -> None:
    put, _, _ = Drive(FIRST, policy=replace(CONNECTOR, ttl=policy)).respond(answered("Hi", d_handle(ttl=ttl)))
    assert put
    assert put.record.ttl == expected


@pytest.mark.parametrize("ttl", [5.0, 10.0])
def test_a_handle_that_nobody_could_use_in_time_is_given_back(ttl: float) -> None:
    drive = Drive(FIRST, policy=CONNECTOR)
    put, _, _ = drive.respond(answered("Hi", d_handle(ttl=ttl)))
    assert put
    assert (put.record.handle, put.record.reason, put.record.ttl) == (None, Outcome.EXPIRED, 450.0)
    assert [spare.handle for spare in drive.turn.spare] == [compact(d_handle(ttl=ttl))]


def test_without_a_proof_the_ttl_is_the_configured_one() -> None:
    put, _, _ = Drive(FIRST, policy=replace(CONNECTOR, ttl=33.0)).respond(answered("Hi", d_handle(proof=False)))
    assert put
    assert put.record.ttl == 33.0


@pytest.mark.parametrize(
    ("host", "node", "expected"),
    [
        ("localhost", D2, "10.1.0.2"),
        ("0.0.0.0", "[fd00::1]:8200", "fd00::1"),
        ("10.9.9.9", D2, "10.9.9.9"),
        ("localhost", None, "10.1.0.1"),
    ],
)
def test_fr80_the_node_that_answered_is_where_the_blocks_are(host: str, node: str | None, expected: str) -> None:
    drive = connector(found(None, reason=Outcome.NO_HANDLE_FROM_DECODE))
    put, _, _ = drive.respond(answered("Hi", d_handle(remote_host=host)), node=node)
    assert put
    assert put.record.handle
    assert json.loads(put.record.handle)["remote_host"] == expected
    assert put.record.decode_node == (node or D1)


def stored(drive: Drive, *pieces: bytes | Json, **more: Any) -> Put | None:  # noqa: ANN401 - as `Drive.respond`
    return drive.respond(*pieces, **more)[0]


MARKED: list[tuple[str, Drive, Json, Outcome]] = [
    ("no handle", Drive(FIRST), answered("Hi"), Outcome.NO_HANDLE_FROM_DECODE),
    ("null", Drive(FIRST), answered("Hi") | {"kv_transfer_params": None}, Outcome.NO_HANDLE_FROM_DECODE),
    ("no blocks", Drive(FIRST), answered("Hi", d_handle(remote_block_ids=[[], []])), Outcome.NO_HANDLE_FROM_DECODE),
    ("no host", Drive(FIRST), answered("Hi", d_handle(remote_host=None)), Outcome.NO_HANDLE_FROM_DECODE),
    ("several choices", Drive(FIRST | {"n": 2}), answered("Hi", d_handle()), Outcome.MULTIPLE_CHOICES),
    ("several choices as text", Drive(FIRST | {"n": "2"}), answered("Hi", d_handle()), Outcome.MULTIPLE_CHOICES),
    ("several choices, no handle", Drive(FIRST | {"best_of": 2}), answered("Hi"), Outcome.MULTIPLE_CHOICES),
    ("D alone", Drive(FIRST, [Taken(), SILENT, SILENT]), answered("Hi"), Outcome.NO_HANDLE_FROM_DECODE),
    (
        "reasoning, when trusted",
        Drive(FIRST, policy=TRUSTED),
        answered("4", d_handle(), reasoning="2+2"),
        Outcome.UNPROVEN,
    ),
]


@pytest.mark.parametrize(("drive", "answer", "reason"), [m[1:] for m in MARKED], ids=[m[0] for m in MARKED])
def test_a_turn_without_a_usable_handle_leaves_the_reason(drive: Drive, answer: Json, reason: Outcome) -> None:
    put = stored(drive, answer)
    assert put
    assert put.record == Record(450.0, None, reason, D1, drive.turn.prefill_node)
    assert put.keys == Drive(FIRST, policy=drive.policy).keys[1:]  # the place of its prompt
    assert not drive.facts.captured
    # So the next turn knows why it is cold, and nobody ever falls back to an older handle.
    assert connector(Taken(put.record, None, 1.0)).facts.outcome == reason


ERRORS: list[Sequence[bytes | Json]] = [
    [{"error": {"code": 500, "message": "x"}}],
    [answered("Hi", d_handle()) | {"error": {"code": 500}}],
    [{"choices": []}],
    [{}],
    [b""],
    [b"<html>"],
    [compact(answered("Hi", d_handle()))[:-1]],
]


@pytest.mark.parametrize("pieces", ERRORS)
def test_an_answer_that_failed_leaves_nothing(pieces: Sequence[bytes | Json]) -> None:
    drive = Drive(FIRST)
    assert stored(drive, *pieces) is None
    assert not drive.facts.captured


def sse(*objs: Json | bytes) -> list[bytes]:
    return [b"data: " + (o if isinstance(o, bytes) else compact(o)) + b"\n\n" for o in objs]


def delta(content: str | None = None, finish: str | None = None, index: int = 0, **more: Any) -> Json:  # noqa: ANN401 - JSON
    return {"choices": [{"index": index, "delta": {"content": content}, "finish_reason": finish}], **more}


@pytest.mark.parametrize(
    "pieces",
    [
        sse({"error": {"code": 500, "message": "x"}}, b"[DONE]"),
        sse(delta("H"), {"error": {"code": 500}}, b"[DONE]"),
        sse(delta("H"), delta("i")),
        [*sse(delta("Hi"))[:1], b'data: {"choices":[{"index":0,"delta":{},"finish_reas'],
        sse(b"[DONE]"),
        [],
    ],
    ids=["error", "error in the middle", "cut off", "cut off within an event", "only the end", "nothing"],
)
def test_fr41_a_stream_that_failed_leaves_nothing(pieces: list[bytes]) -> None:
    drive = Drive(FIRST | {"stream": True})
    assert stored(drive, *pieces, stream=True) is None


@pytest.mark.parametrize(
    "tail",
    [
        sse(delta(None, "stop", kv_transfer_params=d_handle()), b"[DONE]"),
        sse(delta(None, "stop"), {"choices": [], "kv_transfer_params": d_handle()}, b"[DONE]"),
        sse(
            delta(None, "stop"),
            {"choices": [], "usage": {"prompt_tokens": 1}, "kv_transfer_params": d_handle()},
            b"[DONE]",
        ),
    ],
    ids=["finish chunk", "own event", "usage chunk"],
)
def test_a_streamed_turn_is_stored_as_soon_as_the_handle_has_passed(tail: list[bytes]) -> None:
    drive = Drive(FIRST | {"stream": True})
    put, out, _ = drive.respond(*sse(delta("H"), delta("i")), *tail[:-1], stream=True, end=False)
    assert put
    assert put.record.handle == compact(d_handle())
    assert put.keys[0] in Drive(NEXT).keys
    assert b"kv_transfer_params" not in out


def test_the_same_answer_streamed_or_not_is_found_by_the_same_turn() -> None:
    streamed = stored(
        Drive(FIRST | {"stream": True}),
        *sse(delta("H"), delta("i"), delta(None, "stop", kv_transfer_params=d_handle())),
        stream=True,
    )
    whole = stored(Drive(FIRST), answered("Hi", d_handle()))
    assert streamed
    assert whole
    assert streamed.keys == whole.keys


def test_a_turn_is_stored_once() -> None:
    drive = Drive(FIRST)
    put, _, capture = drive.respond(answered("Hi", d_handle()))
    assert put
    assert drive.turn.settle(capture, D1) is None


def test_a_turn_that_was_switched_off_is_not_stored() -> None:
    assert stored(Drive(FIRST, [p_reply()], OFF), answered("Hi", d_handle())) is None


def test_another_choice_than_the_first_does_not_end_up_in_the_key() -> None:
    drive = Drive(FIRST | {"stream": True})
    pieces = sse(delta("Hi"), delta("other", index=1), delta(None, "stop", kv_transfer_params=d_handle()))
    put = stored(drive, *pieces, stream=True)
    assert put
    assert put.keys[0] in Drive(NEXT).keys


def test_when_trusted_only_the_whole_turn_is_a_key() -> None:
    drive = Drive(FIRST, policy=TRUSTED)
    put = stored(drive, answered("Hi", d_handle(proof=False)))
    assert put
    assert len(put.keys) == 1
    assert put.keys[0] in Drive(NEXT, policy=TRUSTED).keys
    for other in (
        request("Hello", "Hi!", "And now?"),
        NEXT | {"tools": []},
        NEXT | {"chat_template_kwargs": {"a": 1}},
        request("Hello"),
    ):
        assert put.keys[0] not in Drive(other, policy=TRUSTED).keys
    assert put.keys[0] not in Drive(NEXT).keys


def test_completions_are_found_by_their_text() -> None:
    text = "word " * 200
    drive = Drive({"model": "m", "prompt": text}, api=Completions())
    answer = {
        "choices": [{"index": 0, "text": "more " * 60, "finish_reason": "stop"}],
        "kv_transfer_params": d_handle(),
    }
    put = stored(drive, answer)
    assert put
    following = Drive({"model": "m", "prompt": text + "more " * 60 + "and on"}, api=Completions())
    assert put.keys[0] in following.keys
    short = Drive({"model": "m", "prompt": "short"}, api=Completions())
    assert short.keys == []
    assert stored(short, {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}) is None


@pytest.mark.parametrize("policy", [CONNECTOR, ROUTER, OFF], ids=lambda p: p.proof)
def test_several_prompts_go_to_d_alone(policy: Policy) -> None:
    # P would answer with the handle of one of them, and D would load its blocks for each.
    body = {"model": "m", "prompt": ["word " * 200, "b"]}
    drive = Drive(body, [], policy, Completions())
    assert drive.asks == []
    assert drive.d_body == body
    assert (drive.facts.outcome, drive.facts.detail) == (Outcome.DECODE_ALONE, "several_prompts")
    assert drive.facts.fallback


def test_completions_with_several_prompts_leave_nothing() -> None:
    drive = Drive({"model": "m", "prompt": ["word " * 200, "b"]}, [], api=Completions())
    assert (
        stored(
            drive, {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], "kv_transfer_params": d_handle()}
        )
        is None
    )


def test_the_client_may_leave_at_any_moment() -> None:
    for steps_before in range(3):
        turn = Turn(Drive(FIRST).api, Drive(FIRST).scope, lambda _: CONNECTOR, Judge())
        steps = turn.request(compact(NEXT))
        results: list[Any] = [None, found(d_handle()), p_reply({})]
        for result in results[:steps_before]:
            steps.send(result)
        steps.close()
        assert turn.answer.finish_reasons == {}


# --- whole conversations ---


def test_an_agents_conversation_is_followed_turn_by_turn() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path":"."}'}}
    echo = {"id": "other-id", "type": "function", "function": {"name": "ls", "arguments": '{ "path": "." }'}}
    messages: list[Json] = [{"role": "system", "content": "s"}, {"role": "user", "content": "list"}]
    first = stored(
        Drive({"model": "m", "messages": messages}), answered(None, d_handle(), tool_calls=[call], reasoning="hm")
    )
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [echo]},
        {"role": "tool", "tool_call_id": "other-id", "content": "a b"},
    ]
    second = Drive({"model": "m", "messages": messages})
    assert first
    assert second.keys.index(first.keys[0]) == 2  # right after the two places of the whole prompt itself
    put = stored(second, answered("done", d_handle()))
    messages += [
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
        {"role": "user", "content": "thanks"},
    ]
    third = Drive({"model": "m", "messages": messages})
    assert put
    assert third.keys.index(put.keys[0]) == 2
    assert third.keys.index(first.keys[0]) > 2


def test_fr77_regenerate_edit_and_branch() -> None:
    put = stored(Drive(FIRST), answered("Hi", d_handle()))
    assert put
    whole, prompt = put.keys
    again, edited_system, branch = (
        Drive(FIRST),
        Drive(request("Hello!", "Hi", "And now?")),
        Drive(request("Hello", "Hi", "Or so?")),
    )
    assert whole not in again.keys
    assert prompt in again.keys  # the prompt itself is what D holds: tokens prove how far
    assert not {whole, prompt} & set(edited_system.keys)
    assert whole in branch.keys


def test_no_conversation_of_one_tenant_is_found_by_another() -> None:
    put = stored(Drive(FIRST), answered("Hi", d_handle()))
    assert put
    for other in (replace(Drive(FIRST).scope, tenant=b"other"), replace(Drive(FIRST).scope, key=b"other")):
        assert not set(put.keys) & set(Drive(NEXT, scope=other).keys)
    for changed in ({"model": "other"}, {"cache_salt": "other"}):
        assert not set(put.keys) & set(Drive(NEXT | changed).keys)
