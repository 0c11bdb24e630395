"""Whose answers the fast lane's scripts take on, and whose go by ext_proc, or by neither; and what headers become."""

from collections.abc import Mapping

import pytest

from kvreturn.core.scrub import foreign_headers
from support.lanes import ROUTER, SSE, TURN, FastLane
from support.turns import compact, d_handle

TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
FINISH = b'data: {"choices":[{"finish_reason":"stop"}]}\n\n'
HANDED = FINISH.replace(b"}\n", b',"kv_transfer_params":%b}\n' % compact(d_handle(161)))
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "headers",
    [
        SSE | {":status": "400"},
        SSE | {":status": "503"},
        SSE | {"content-encoding": "gzip"},
        SSE | {"content-encoding": "identity"},
        SSE | {"trailer": "x-checksum"},
        {k: v for k, v in SSE.items() if k != "transfer-encoding"},  # perhaps HTTP/2, which may end in trailers
        {":status": "200", "content-type": "application/json"},
        SSE | {"content-type": "application/x-text/event-stream"},
        {":status": "200"},
    ],
    ids=str,
)
def test_what_the_portable_lane_must_read_is_left_to_it(headers: Mapping[str, str]) -> None:
    lane = FastLane(headers)
    assert lane.play([TOKEN, HANDED]) == TOKEN + HANDED  # it is ext_proc that looks at these
    assert (lane.by_ext_proc, lane.taken_on, lane.calls, lane.errors) == (True, False, [], [])


def test_what_the_router_gives_no_permission_for_is_left_to_it() -> None:
    lane = FastLane(turn={"turn": TURN["turn"], "router": ROUTER})
    assert lane.play([HANDED]) == HANDED
    assert (lane.by_ext_proc, lane.taken_on, lane.calls, lane.errors) == (True, False, [], [])


@pytest.mark.parametrize("turn", [None, {}, {"decode_node": "node-2:8200"}, {"lane": "1", "router": ROUTER}], ids=str)
@pytest.mark.parametrize(
    "headers", [SSE, {":status": "200"}, {":status": "503", "content-type": "text/plain"}], ids=str
)
def test_what_is_none_of_the_routers_business_passes_without_it(
    headers: Mapping[str, str], turn: Mapping[str, str] | None
) -> None:
    lane = FastLane(headers, turn=turn)
    assert lane.play([TOKEN]) == TOKEN
    assert (lane.by_ext_proc, lane.taken_on, lane.calls, lane.errors) == (False, False, [], [])
    assert lane.got == headers


# Whose answer it is, what it is, and whether ext_proc looks at it.
_ANSWERS = [
    (TURN, SSE, False),
    (TURN, {":status": "200", "content-type": "application/json"}, True),
    (TURN, SSE | {":status": "500"}, True),
    (None, SSE, False),
]


@pytest.mark.parametrize(("turn", "headers", "by_ext_proc"), _ANSWERS)
@pytest.mark.parametrize("passes", ["1", "0", None])
def test_no_client_sees_what_the_filters_tell_one_another_and_no_node_has_a_say(
    turn: Mapping[str, str] | None,
    headers: Mapping[str, str],
    by_ext_proc: bool,  # noqa: FBT001 - a case of a table
    passes: str | None,
) -> None:
    nodes = {"x-kvreturn-passes": passes} if passes else {}
    lane = FastLane({**headers, **nodes, "x-other": "1"}, turn=turn)
    assert lane.by_ext_proc == by_ext_proc
    assert lane.got == {**headers, "x-other": "1"}


@pytest.mark.parametrize(
    ("name", "goes"),
    [
        ("x-gateway-destination-endpoint-served", True),
        ("x-kvreturn-turn", True),
        ("x-dynamo-worker", True),
        ("x-data-parallel-rank", True),
        ("x-prefiller-url", True),
        ("target-pod", True),
        ("x-prefiller-urls", False),
        ("x-dynamo", False),
        ("target", False),
        ("server", False),
    ],
)
def test_other_routers_headers_do_not_reach_the_client(name: str, goes: bool) -> None:  # noqa: FBT001 - a case of a table
    got = FastLane(SSE | {name: "10.0.0.2"}).got
    assert got == (SSE if goes else SSE | {name: "10.0.0.2"})
    assert goes == bool(foreign_headers([name]))  # as in the portable lane


@pytest.mark.parametrize(
    ("nodes", "clients", "expected"),
    [
        ("of-the-router", "the-clients:own", "the-clients:own"),
        ("of-the-router", None, "of-the-router"),
        (None, "the-clients:own", None),
    ],
)
def test_the_client_gets_its_own_id_of_the_request_again(
    nodes: str | None, clients: str | None, expected: str | None
) -> None:
    lane = FastLane(
        SSE | ({"x-request-id": nodes} if nodes else {}), turn=TURN | ({"request_id": clients} if clients else {})
    )
    assert lane.got.get("x-request-id") == expected


def test_the_length_that_a_node_gives_goes_since_the_answer_changes() -> None:
    assert FastLane(SSE | {"content-length": "5"}).got == SSE


@pytest.mark.parametrize("kind", ["text/event-stream", "Text/Event-Stream;charset=utf-8"])
@pytest.mark.parametrize("status", ["200", "206"])
def test_streams_are_taken_on(kind: str, status: str) -> None:
    lane = FastLane(SSE | {":status": status, "content-type": kind})
    assert lane.play([TOKEN, HANDED, DONE]) == TOKEN + FINISH + DONE
    assert lane.taken_on
