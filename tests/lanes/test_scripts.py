"""How the fast lane's scripts have answers that they have taken on: what is held, whom they tell what, and when."""

from collections.abc import Sequence

import pytest

from kvreturn.server.part import Begun, Part
from support import cuts
from support.events import response_events
from support.lanes import CLOSED, LATE, ROUTER, SSE, TURN, UNREACHABLE, Answer, End, FastLane, ours, scripts
from support.turns import compact, d_handle

RAW = compact(d_handle(161))
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
FINISH = b'data: {"choices":[{"finish_reason":"stop"}]}\n\n'
HANDED = FINISH.replace(b"}\n", b',"kv_transfer_params":%b}\n' % RAW)
DONE = b"data: [DONE]\n\n"
_PART = 262_144


@pytest.mark.parametrize("by", ["empty", "last"])
def test_the_end_of_a_turn_is_held_until_the_router_has_what_it_left(by: End) -> None:
    lane = FastLane()
    assert lane.play([TOKEN, TOKEN, HANDED, DONE], by=by) == TOKEN + TOKEN + FINISH + DONE
    (call,) = lane.calls
    assert (call.waited, call.last, call.text) == (True, True, TOKEN + TOKEN + HANDED + DONE)
    assert call.passed == 2 * len(TOKEN)  # and not the finish


def test_a_large_event_with_the_handle_is_held_too() -> None:
    """The last event of `/v1/responses` has the whole answer in it, and the tools of the request."""
    pieces = response_events("x" * 200_000, params=d_handle(161))
    lane = FastLane()
    lane.play(pieces)
    assert not any(lane.out[len(pieces) - 1 : -1])
    (*_, call) = lane.calls
    assert (call.last, call.waited) == (True, True)


@pytest.mark.parametrize(
    "pieces",
    [
        response_events(params=d_handle(161)),
        [TOKEN.replace(b"}\n", b',"kv_transfer_params":null,"ec_transfer_params": null}\n'), HANDED, DONE],
        [TOKEN.replace(b'"a"', b'"kv_transfer_params"'), HANDED, DONE],
    ],
    ids=["responses", "null", "a token of that name"],
)
def test_what_only_names_a_handle_is_not_held_back(pieces: Sequence[bytes]) -> None:
    lane = FastLane()
    lane.play(pieces)
    handed = next(i for i, piece in enumerate(pieces) if RAW in piece)
    assert all(lane.out[:handed])
    assert not any(lane.out[handed:-1])


def test_the_holding_script_is_not_woken_before_the_end() -> None:
    lane = FastLane()
    lane.chunk(TOKEN)
    assert lane.holding.waits == b"trailers"


def test_an_answer_that_goes_on_behind_its_handle_is_not_held_back_for_long() -> None:
    lane = FastLane()
    token = b"data: " + b"x" * 1000 + b"\n\n"
    assert lane.play([HANDED, *[token] * 200, DONE]) == FINISH + token * 200 + DONE
    held = next(i for i, out in enumerate(lane.out) if out)
    assert (held + 1) * len(token) > 65_536 > (held - 1) * len(token)
    assert lane.out[held + 1 : -2] == [token] * (200 - held)


@pytest.mark.parametrize("answer", [LATE, CLOSED, UNREACHABLE], ids=lambda a: a.body.decode()[-22:])
def test_a_router_that_had_no_time_is_told_again_while_nothing_waits(answer: Answer) -> None:
    lane = FastLane(answer=answer)
    lane.play([TOKEN, HANDED, DONE])
    first, again = lane.calls
    assert (first.waited, again.waited) == (True, False)
    assert (again.headers, again.body) == (first.headers, first.body)


def test_a_router_that_does_not_know_the_turn_is_told_once() -> None:
    lane = FastLane(answer=ours(status=404))
    lane.play([TOKEN, HANDED, DONE])
    assert [c.number for c in lane.calls] == [1]


def test_the_end_of_a_stream_without_a_handle_is_held_too() -> None:
    lane = FastLane()
    lane.play([TOKEN, FINISH, DONE])
    (call,) = lane.calls
    assert (call.waited, call.last, call.text, call.passed) == (True, True, TOKEN + FINISH + DONE, len(call.text))


def test_a_body_that_trailers_end_is_told_of() -> None:
    lane = FastLane()
    lane.chunk(TOKEN)
    lane.trailers()
    assert [(c.last, c.waited, c.text) for c in lane.calls] == [(True, True, TOKEN)]


def test_what_was_held_back_is_lost_where_trailers_end_the_body() -> None:
    """As in the portable lane; but here that is all from the handle on. So what may have trailers is not taken on."""
    lane = FastLane()
    lane.chunk(TOKEN)
    assert lane.chunk(HANDED) == b""
    lane.trailers()
    assert b"".join(lane.out) == TOKEN
    assert [(c.last, c.waited, c.text) for c in lane.calls] == [(True, False, TOKEN + HANDED)]


def test_an_answer_that_its_node_keeps_is_told_of_from_its_first_event_on() -> None:
    lane = FastLane(turn=TURN | {"early": "1"})
    lane.play([TOKEN[:9], TOKEN[9:], TOKEN, HANDED, DONE])
    assert [(c.waited, c.last, c.text, c.passed) for c in lane.calls] == [
        (True, False, TOKEN, 0),
        (True, True, TOKEN + HANDED + DONE, 2 * len(TOKEN)),
    ]


def test_what_one_script_has_held_for_the_other_is_in_no_access_log() -> None:
    lane = FastLane(turn=TURN | {"early": "1"})
    lane.chunk(TOKEN)
    assert lane.exchange.metadata_in("kvreturn.hold") == {"first": ""}
    lane.chunk(HANDED)
    lane.chunk(b"", last=True)
    assert lane.exchange.metadata_in("kvreturn.hold") == {"first": "", "end": ""}
    assert len(lane.calls) == 2


def test_an_answer_of_one_piece_tells_the_first_event_with_the_end() -> None:
    lane = FastLane(turn=TURN | {"early": "1"})
    assert lane.play([TOKEN + HANDED + DONE]) == TOKEN + FINISH + DONE
    assert [(c.number, c.last, c.waited) for c in lane.calls] == [(1, True, True)]


def test_a_long_answer_is_told_in_parts_for_which_nothing_waits() -> None:
    lane = FastLane()
    token = b"data: " + b"x" * 1000 + b"\n\n"
    assert lane.play([token] * 600) == token * 600
    assert lane.told == token * 600
    each = -(-_PART // len(token)) * len(token)
    assert [(len(c.text), c.waited) for c in lane.calls] == [
        (each, False),
        (each, False),
        (600 * len(token) - 2 * each, True),
    ]


def test_a_slow_answer_is_told_every_twenty_seconds() -> None:
    lane = FastLane()
    began = lane.thread.clock()
    lane.thread.clock = lambda: began + 19
    lane.chunk(TOKEN)
    assert lane.calls == []
    lane.thread.clock = lambda: began + 21
    lane.chunk(TOKEN)
    assert [(c.text, c.waited) for c in lane.calls] == [(TOKEN + TOKEN, False)]


def test_the_first_pieces_are_timed() -> None:
    lane = FastLane()
    for i in range(20):
        lane.at(1000 + i)
        lane.chunk(TOKEN)
    lane.at(1100)
    lane.chunk(b"", last=True)
    (call,) = lane.calls
    assert call.about[3:] == [f"{len(TOKEN)}:{100 - i}" for i in range(16)]


def test_a_call_names_the_turn_and_goes_to_its_router() -> None:
    lane = FastLane()
    lane.play([HANDED])
    (call,) = lane.calls
    assert call.cluster == f"kvreturn_calls@{ROUTER}"
    assert call.headers == {
        ":method": "POST",
        ":path": "/kvreturn/part",
        ":authority": "kvreturn",
        "x-kvreturn-turn": TURN["turn"],
        "x-kvreturn-part": call.headers["x-kvreturn-part"],
    }


@pytest.mark.parametrize(
    ("status", "node", "said"), [("200", "10.0.0.2:8200", "200,50,10.0.0.2:8200"), ("206", None, "206,50,")]
)
def test_the_first_part_tells_how_the_answer_began_and_no_other_does(status: str, node: str | None, said: str) -> None:
    upstream = {"upstream": node} if node else {}  # Envoy tells where it has not taken the node that it was to take
    lane = FastLane(SSE | {":status": status}, turn=TURN | upstream, began=1000)
    lane.at(1050)
    lane.chunk(b"x" * _PART)
    lane.chunk(TOKEN, last=True)
    first, last = lane.calls
    assert first.about == ["1", "0", said, f"{_PART}:0"]
    assert last.about == ["2", "1", f"{len(TOKEN)}:0"]
    told = Part.read(" ".join(first.about), first.body)
    assert told.begun == Begun(int(status), 0.05, node)


def test_the_router_waits_no_longer_than_its_stores_deadline_and_half_a_second() -> None:
    assert "local TIMEOUT = 520\n" in scripts()[1]
    lane = FastLane()
    lane.play([HANDED])
    assert [c.timeout for c in lane.calls] == [520]


def test_the_memory_of_an_event_is_bounded() -> None:
    lane = FastLane(limit=1000)
    head = b'data: {"a":1,"kv_transfer_params":{"b":"'
    assert lane.play([head, *[b"x" * 500] * 2000, b'"}}\n\n']) == b'data: {"a":1}\n\n'
    assert max(len(c.text) for c in lane.calls) < _PART + 1000  # what was not told yet is all that was kept


# --- a script that fails ---


def breaking(where: str) -> FastLane:
    """The script fails at the second piece that comes there."""
    broken = "local times = 0\nlocal function fail() times = times + 1 if times == 2 then error('broken') end end\n"
    return FastLane(change=lambda script: broken + script.replace(where, f"{where}\n  fail()"))


@pytest.mark.parametrize(
    "where",
    [
        "function Events:decode(data)",
        "function Answer:keep(handle, bytes)",
        "local function pass(handle, answer, chunk)",
    ],
)
def test_an_answer_is_cut_where_the_script_fails_and_nothing_leaks(where: str) -> None:
    lane = breaking(where)
    assert lane.play([TOKEN, *cuts.by(100, HANDED), DONE]) == TOKEN
    assert [b"cuts an answer" in e for e in lane.errors] == [True]
    assert lane.calls[-1].last  # the router is told that no more comes


def test_where_the_router_cannot_be_called_the_answer_passes_without_the_handle() -> None:
    lane = breaking("function Answer:hand(handle, last, hold)")
    assert lane.play([TOKEN, HANDED, DONE]) == TOKEN + FINISH + DONE
    assert lane.errors == []


def test_a_holding_script_that_fails_lets_clean_bytes_pass() -> None:
    lane = FastLane(answer=None)  # Envoy has no such cluster
    assert lane.play([TOKEN, HANDED, DONE]) == TOKEN + FINISH + DONE
    assert len(lane.errors) == 1
