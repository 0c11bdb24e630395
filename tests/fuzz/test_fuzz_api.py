"""Fuzz targets: each API's requests and answers, alone and through a whole turn."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fuzz.strategies import SECRET, bounded, chunks, cuts, nested, objects, replies, requests, texts, values
from kvreturn.core.api import API, APIS
from kvreturn.core.api.base import BadRequestError
from kvreturn.core.capture import open_capture
from kvreturn.core.fingerprint import Scope
from kvreturn.core.handle import PARAMS
from kvreturn.core.jsontext import JSONTextError, ObjectText
from kvreturn.core.outcome import Outcome
from kvreturn.core.policy import Policy
from kvreturn.core.ports import (
    Ask,
    Await,
    Awaited,
    Effect,
    Forward,
    Recall,
    Record,
    Refuse,
    Reply,
    Result,
    Take,
    Taken,
)
from kvreturn.core.turn import Turn
from support.cuts import at
from support.turns import D1, P1, SCOPE, Judge, compact, d_handle, p_params

apis = st.sampled_from(APIS)
_TRAIL = Scope(b"k", b"t")


@bounded
@given(apis, requests, st.booleans())
def test_a_request_is_read_or_refused(api: API, request: dict[str, Any], strict: bool) -> None:  # noqa: FBT001
    body = ObjectText(compact(request))
    try:
        prompt = api.read(body, strict=strict)
    except (BadRequestError, JSONTextError):
        return
    assert all(isinstance(item, bytes) for item in prompt.items)
    leg = json.loads(api.prefill_body(body, b'{"x":1}', ids=prompt.identifiable))
    limits = [leg[name] for name in ("max_tokens", "max_output_tokens") if name in leg]
    assert (leg["stream"], leg[PARAMS], limits) == (False, {"x": 1}, [1])
    if prompt.tokenizable:
        assert json.loads(api.tokenize_body(body))["model"] == request["model"]
    spaced = ObjectText(json.dumps(request, indent=1, sort_keys=True).encode())
    again = api.read(spaced, strict=strict)
    trails = [_TRAIL.trail(p.root, p.items) for p in (prompt, again)]
    assert strict or trails[0] == trails[1], "white space and the order of members made another conversation"


@bounded
@given(apis, st.lists(chunks, max_size=6), st.booleans(), requests)
def test_an_answer_of_any_shape_is_taken(api: API, parts: list[Any], stream: bool, request: dict[str, Any]) -> None:  # noqa: FBT001
    answer = api.answer()
    for part in parts:
        answer.read(part, stream=stream)
    for strict in (False, True):
        items = answer.items(strict=strict)
        assert items is None or all(isinstance(item, bytes) for item in items)
    body = ObjectText(compact(request))
    try:
        prompt = api.read(body, strict=False)
    except (BadRequestError, JSONTextError):
        return
    api.extend(_TRAIL.trail(prompt.root, prompt.items), body, answer, strict=False)


@bounded
@given(apis, st.lists(texts(chunks), max_size=6), cuts, cuts)
def test_an_answer_is_the_same_wherever_its_stream_was_cut(
    api: API, parts: list[bytes], one: list[int], other: list[int]
) -> None:
    stream = b"".join(b"data: " + p.replace(b"\r", b" ").replace(b"\n", b" ") + b"\n\n" for p in parts)
    answers = []
    for offsets in (one, other):
        answers.append(api.answer())
        capture = open_capture("text/event-stream", answers[-1], event_bytes=1 << 20, response_bytes=1 << 20)
        assert b"".join([capture.decode(piece) for piece in at(offsets, stream)]) + capture.flush() == stream
        assert capture.failed is None
    assert repr(answers[0]) == repr(answers[1])


# --- whole turns ---


@st.composite
def takens(draw: st.DrawFn) -> Taken:
    """What the store has: nothing, or a handle with something odd in it."""
    if draw(st.booleans()):
        return Taken(None, draw(st.none() | st.sampled_from(Outcome)))
    handle = d_handle(160) | draw(st.dictionaries(st.sampled_from(list(d_handle(1))), values, max_size=2))
    raw = draw(st.sampled_from([compact(handle), None]) | texts())
    returned, pending = draw(st.sampled_from([0, 100])), draw(st.booleans())
    record = Record(450.0, raw, draw(st.none() | st.sampled_from(Outcome)), D1, P1, 100, 2, returned, pending)
    return Taken(record, None, 2.0, b"ticket")


policies = st.builds(
    Policy,
    proof=st.sampled_from(["connector", "router", "trusted", "off"]),
    fallback=st.booleans(),
    secret=st.sampled_from([b"", b"secret"]),
    returns=st.sampled_from(["lazy", "eager"]),
)
bodies = requests.map(compact) | st.binary(max_size=60) | texts(objects)
answer_bodies = st.lists(chunks, min_size=1, max_size=3)


@bounded
@given(
    apis, bodies, policies, takens(), st.lists(replies(), min_size=6, max_size=6), answer_bodies, cuts, st.booleans()
)
def test_a_turn_ends_in_a_decision_and_leaks_nothing(  # noqa: PLR0917 - drawn
    api: API,
    body: bytes,
    policy: Policy,
    taken: Taken,
    answers: list[Reply],
    parts: list[Any],
    offsets: list[int],
    stream: bool,  # noqa: FBT001
) -> None:
    turn, asked = Turn(api, SCOPE, lambda _: policy, _Quiet()), iter(answers)

    def result(effect: Effect) -> Result:
        match effect:
            case Take():
                return taken
            case Recall():
                return Taken()
            case Await():
                return Awaited("late")
            case Ask():
                json.loads(effect.body)
                return next(asked)

    steps = turn.request(body)
    try:
        effect = next(steps)
        while True:
            effect = steps.send(result(effect))
    except StopIteration as stop:
        decision = stop.value
    if isinstance(decision, Refuse):
        assert 400 <= decision.status < 600
        return
    assert isinstance(decision, Forward)
    json.loads(decision.body)
    handle = d_handle(160, remote_host=SECRET)
    raw = [compact({PARAMS: handle, **p} if i == len(parts) - 1 else p) for i, p in enumerate(parts)]
    text = b"".join(b"data: %b\n\n" % r for r in raw) if stream else raw[-1]
    kind = "text/event-stream" if stream else "application/json"
    capture = open_capture(kind, turn.answer, event_bytes=1 << 20, response_bytes=1 << 20, ids=turn.ids_in_answer)
    out = b"".join([capture.decode(piece) for piece in at(offsets, text)]) + capture.flush()
    assert SECRET.encode() not in out
    turn.settle(capture, D1)


class _Quiet(Judge):
    """Objects to nothing."""


@bounded
@given(apis, nested(), st.sampled_from(["messages", "input", "prompt", "tools", "cache_salt", "metadata", "x"]))
def test_no_depth_harms_a_turn(api: API, text: bytes, name: str) -> None:
    members = {"model": b'"m"', "messages": b'[{"role":"user"}]', "input": b'"x"', "prompt": b'"x"', name: text}
    body = b"{%b}" % b",".join(b'"%b":%b' % (k.encode(), v) for k, v in members.items())
    turn = Turn(api, SCOPE, lambda _: Policy(proof="connector"), Judge())
    steps = turn.request(body)
    try:
        next(steps)
        steps.send(Taken())
        steps.send(Reply(P1, 200, compact({PARAMS: p_params()})))
    except StopIteration as stop:
        assert isinstance(stop.value, Forward | Refuse)  # noqa: PT017 - how a generator returns
