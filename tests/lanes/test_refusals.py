"""Requests that do not go on: refused by the router, taken by none, or failed in the script. Nothing of them passes."""

import itertools
import json
from collections.abc import Mapping, Sequence

import pytest

from kvreturn.core.ports import Refuse
from kvreturn.server.called import reply
from support.asked import BODY, CHAT, Asked, fields
from support.lanes import (
    BROKEN,
    CLOSED,
    FULL,
    LATE,
    NO_ROUTE,
    UNHEALTHY,
    UNREACHABLE,
    Answer,
    ours,
    scripts,
    worker,
)


def refused(asked: Asked) -> tuple[int, dict[str, str], bytes]:
    """What the client gets, and that nothing else happens."""
    assert asked.response
    assert asked.passed == b""
    assert asked.exchange.metadata == {}
    assert asked.exchange.override is None
    return asked.response


@pytest.mark.parametrize(
    ("refusal", "headers"),
    [
        (Refuse(413, b'{"error":{}}', why="too_large"), {"content-type": "application/json"}),
        (Refuse(429, b"a\n\nb\n", headers={"retry-after": "3"}, why="quota"),
         {"content-type": "application/json", "retry-after": "3"}),
        (Refuse(400, b"", why="bad"), {"content-type": "application/json"}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("body", [None, [BODY[:7], BODY[7:]]], ids=["without a body", "with one"])
def test_a_refusal_is_given_as_the_router_has_it(
    refusal: Refuse, headers: Mapping[str, str], body: Sequence[bytes] | None
) -> None:
    asked = Asked(fields(), body, lambda _: ours(reply(refusal, BODY)))
    assert refused(asked) == (refusal.status, headers, refusal.body)
    assert asked.errors == []


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    "answer", [ours(reply(Refuse(403, b"no", why="tenant"), b"")), CLOSED], ids=["refused", "closed"]
)
def test_nothing_passes_of_a_body_that_nobody_reads_if_its_request_does_not(answer: Answer, slow: bool) -> None:  # noqa: FBT001
    asked = Asked(fields("/v1/files", "text/plain"), [b"a", b"b", b""], lambda _: answer, slow=slow)
    assert refused(asked)[0] in {403, 500}


THREE = ("10.1.0.1:9090", "10.1.0.2:9090", "10.1.0.3:9090")
GO = ours(b"go\nset x-by:a router\n\n")


def through(*answers: Answer, path: str = CHAT) -> Asked:
    """A request that three routers may take, which answer so in turn."""
    left = iter(answers)
    return Asked(fields(path), [BODY], lambda _: next(left), on=worker(scripts(routers=THREE)[0]))


@pytest.mark.parametrize("down", [UNREACHABLE, NO_ROUTE, FULL, UNHEALTHY], ids=lambda a: a.body.decode()[-24:])
@pytest.mark.parametrize("before", [1, 2])
def test_the_next_router_takes_what_nobody_has_begun_with(down: Answer, before: int) -> None:
    asked = through(*[down] * before, GO)
    assert [c.cluster for c in asked.calls] == [f"kvreturn_requests@{router}" for router in THREE[: before + 1]]
    assert len({(c.headers["x-kvreturn-head"], c.body) for c in asked.calls}) == 1
    assert (asked.response, asked.passed) == (None, BODY)
    assert ("x-by", "a router") in asked.sent


@pytest.mark.parametrize(
    "answer",
    [
        CLOSED,
        BROKEN,
        LATE,
        Answer(400, b"Bad Request"),
        Answer(404, b"404: Not Found"),
        Answer(200, b"go\n\n"),
        Answer(503),
    ],
    ids=lambda a: f"{a.status} {a.body.decode()[-22:]}",
)
def test_what_a_router_may_have_begun_with_goes_to_no_other(answer: Answer) -> None:
    asked = through(UNREACHABLE, answer, GO)
    assert len(asked.calls) == 2
    assert refused(asked)[0] == (504 if answer is LATE else 500)


def test_a_routers_own_error_is_what_it_says_and_no_fault_of_the_way_there() -> None:
    said = reply(Refuse(503, UNHEALTHY.body, why="drain"), b"")
    asked = through(ours(said), GO)
    assert len(asked.calls) == 1
    assert refused(asked)[0] == 503


def test_routers_are_asked_in_turn() -> None:
    thread = worker(scripts(routers=THREE)[0])
    seen = [Asked(fields(), [BODY], lambda _: GO, on=thread).calls[0].cluster for _ in range(7)]
    assert seen == [f"kvreturn_requests@{router}" for router in itertools.islice(itertools.cycle(THREE), 7)]


_LATE_TEXT = "kvreturn: the router did not answer in time; try again later"
_NONE_TEXT = (
    "kvreturn: no router could take this request to its end; try again. If this goes on, no router is up: tell who "
    "runs this service"
)


@pytest.mark.parametrize(
    ("answers", "status", "text", "openai", "anthropic"),
    [
        ([LATE], 504, _LATE_TEXT, "GatewayTimeout", "timeout_error"),
        ([CLOSED], 500, _NONE_TEXT, "InternalServerError", "api_error"),
        ([UNREACHABLE, UNHEALTHY, FULL], 500, _NONE_TEXT, "InternalServerError", "api_error"),
    ],
)
def test_a_client_is_told_in_its_own_apis_words_that_no_router_answers(
    answers: list[Answer], status: int, text: str, openai: str, anthropic: str
) -> None:
    for path, expected in (
        (CHAT, {"error": {"message": text, "type": openai, "param": None, "code": status}}),
        ("/v1/messages", {"type": "error", "error": {"type": anthropic, "message": text}}),
    ):
        asked = through(*answers, path=path)
        said, headers, body = refused(asked)
        assert (said, headers) == (status, {"content-type": "application/json", "retry-after": "1"})
        assert json.loads(body) == expected
        (told,) = asked.errors
        assert b"no router has answered at its `calls` address" in told


# --- a script that fails ---


def check_failed(asked: Asked) -> None:
    """The client gets an error, and no node gets the request."""
    status, headers, body = refused(asked)
    assert (status, headers["content-type"]) == (500, "application/json")
    assert json.loads(body)["error"]["message"] == "kvreturn: internal error"
    (error,) = asked.errors
    assert b"failed with a request" in error


@pytest.mark.parametrize(
    "where",
    [
        "local function request(handle)",
        "local function head_of(headers)",
        "local function is_read(headers)",
        "local function ask(handle, head, kind, body)",
        "local function apply(handle, router, said, body)",
        "local function towards(handle, metadata, node)",
        "local function no_router(handle, status)",
    ],
)
def test_where_the_script_fails_the_request_does_not_pass(where: str) -> None:
    script = scripts()[0]
    assert where in script
    thread = worker(script.replace(where, f"{where}\n  error('broken')"))
    answer = CLOSED if "no_router" in where else ours(b"go\nmeta decode_node:10.0.0.2:8200\n\n")
    check_failed(Asked(fields(), [BODY[:3], BODY[3:]], lambda _: answer, on=thread))


@pytest.mark.parametrize(
    "said",
    [
        *(b"", b"go\n", b"go\nset x\n\n", b"answer 99\n\n", b"answer x\n\n"),
        *(b"go\nput x\n\n", b"go\nkeep 1\n\n", b"go\nkeep 0 28\n\n", b"go\nkeep 2 1\n\n", b"go\nkeep 0 1e9\n\n"),
    ],
    ids=repr,
)
def test_a_request_does_not_pass_where_the_script_cannot_do_as_it_is_told(said: bytes) -> None:
    check_failed(Asked(fields(), [BODY], lambda _: ours(said)))


def test_a_router_that_envoy_has_no_cluster_for_lets_nothing_pass() -> None:
    check_failed(Asked(fields(), [BODY], lambda _: None))


@pytest.mark.parametrize("said", [b"go\nput 1\n\na", b"go\nkeep 0 0\n\n", b"go\nput 0\n\n"])
def test_no_body_is_sent_on_that_the_request_does_not_have(said: bytes) -> None:
    check_failed(Asked(fields(), None, lambda _: ours(said)))
