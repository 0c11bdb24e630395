"""How the fast lane's script has requests: what the router is told of them, and that it is done as the router says."""

import base64
import itertools
import json
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.core.api import APIS
from kvreturn.core.ports import Refuse
from kvreturn.server.called import Go, read_head, reply
from kvreturn.server.intake import is_read
from kvreturn.server.messages import Headers
from support.lanes import (
    BROKEN,
    CLOSED,
    FULL,
    LATE,
    NO_ROUTE,
    ROUTER,
    UNHEALTHY,
    UNREACHABLE,
    Answer,
    Asked,
    Call,
    ours,
    scripts,
    worker,
)

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
BODY = b'{"model":"m","messages":[]}'
Fields = Sequence[tuple[str, str]]


def fields(path: str = CHAT, kind: str | None = "application/json", **more: str) -> list[tuple[str, str]]:
    """Headers of a request."""
    out = [(":authority", "a"), (":path", path), (":method", "POST"), (":scheme", "http")]
    out += [("content-type", kind)] if kind is not None else []
    return [*out, *((name.replace("_", "-"), value) for name, value in more.items())]


def told(said: bytes, body: Sequence[bytes] | None = (BODY,), of: Fields | None = None) -> Asked:
    """A request of which the router says so."""
    asked = Asked(of or fields(), body, lambda _: ours(said))
    assert (asked.errors, asked.response) == ([], None)
    return asked


def head(call: Call) -> tuple[str, str, bytes]:
    """Version, kind and headers of a request that is told of."""
    version, kind, text = call.headers["x-kvreturn-head"].split(" ")
    return version, kind, base64.b64decode(text)


# --- what the router is told ---


def test_a_request_is_told_of_in_one_call_that_it_waits_for() -> None:
    (call,) = Asked(fields(), [BODY[:9], BODY[9:]]).calls
    assert (call.cluster, call.body, call.waited) == (f"kvreturn_calls@{ROUTER}", BODY, True)
    assert call.headers == {
        ":method": "POST",
        ":path": "/kvreturn/request",
        ":authority": "kvreturn",
        "x-kvreturn-head": call.headers["x-kvreturn-head"],
    }
    assert call.timeout == 35_000  # five seconds more than the prefill leg may take
    assert head(call)[:2] == ("2", "whole")


def test_all_headers_are_told_of_as_they_came() -> None:
    came = [
        *fields(cookie="a=1"),
        ("cookie", "b=2"),
        ("x-empty", ""),
        ("x-colon", "a:b: c"),
        ("x-bytes", "\xc3\xa9\xff"),
    ]
    (call,) = Asked(came, [BODY]).calls
    text = head(call)[2]
    assert text == b"".join(f"{name}:{value}\n".encode("latin-1") for name, value in came)
    assert read_head(text) == {
        ":authority": "a",
        ":path": CHAT,
        ":method": "POST",
        ":scheme": "http",
        "content-type": "application/json",
        "cookie": "a=1,b=2",
        "x-empty": "",
        "x-colon": "a:b: c",
        "x-bytes": "\xc3\xa9\xff",
    }


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream", "", None])
def test_a_turns_body_is_read_whatever_it_calls_itself(api: type, kind: str | None) -> None:
    path: str = api.path  # type: ignore[attr-defined]
    for written in (
        path,
        f"{path}?a=/x",
        path.replace("c", "%63"),
        path.replace("s", "%73"),
        path.replace("/v", "%2Fv"),
    ):
        (call,) = Asked(fields(written, kind), [BODY]).calls
        assert (head(call)[1], call.body) == ("whole", BODY)


@pytest.mark.parametrize(
    ("path", "kind", "read"),
    [
        ("/v1/embeddings", "application/json", True),
        ("/v1/embeddings", "application/problem+json; charset=utf-8", True),
        ("/v1/embeddings", "APPLICATION/JSON", True),
        ("/v1/embeddings", "", True),  # FastAPI reads it as JSON
        ("/v1/embeddings", None, True),
        ("/v1/audio/transcriptions", "multipart/form-data; boundary=x", True),
        ("/v1/audio/transcriptions", "application/x-www-form-urlencoded", True),
        ("/v1/files", "application/octet-stream", False),
        ("/v1/files", "text/plain", False),
        ("/v1/chat/completions/more", "text/plain", False),
        ("/V1/chat/completions", "text/plain", False),
        ("/v1/chat/completion%", "text/plain", False),
        ("/x?/v1/chat/completions", "text/plain", False),
    ],
)
def test_whose_body_the_router_gets(path: str, kind: str | None, read: bool) -> None:  # noqa: FBT001 - a case of a table
    asked = Asked(fields(path, kind), [BODY[:5], BODY[5:]])
    (call,) = asked.calls
    assert (head(call)[1], call.body) == (("whole", BODY) if read else ("left", b""))
    assert (asked.passed, asked.errors) == (BODY, [])


@pytest.mark.parametrize("path", [CHAT, "/v1/responses/resp_1"])
def test_a_request_without_a_body_is_told_of_as_such(path: str) -> None:
    asked = Asked(fields(path))
    (call,) = asked.calls
    assert (head(call)[1], call.body, asked.errors) == ("none", b"", [])


_PARTS = [
    "json",
    "application/",
    "text/plain",
    "form",
    "multipart/form-data",
    "+",
    ";",
    ",",
    " ",
    "j",
    "son",
    "JSON",
    "\xe9",
]
_PATHS = [
    "/v1/",
    "chat",
    "/completions",
    "messages",
    "responses",
    "%63",
    "%2F",
    "%",
    "%4",
    "?",
    "/",
    "%00",
    "%E4",
    "\xe4",
]


@given(
    kinds=st.lists(st.lists(st.sampled_from(_PARTS), max_size=4).map("".join), max_size=2),
    path=st.lists(st.sampled_from(_PATHS), max_size=5).map("".join),
)
def test_what_the_script_does_not_read_the_router_would_not_either(kinds: list[str], path: str) -> None:
    (call,) = Asked([*fields(path, None), *(("content-type", kind) for kind in kinds)], [BODY]).calls
    _, kind, text = head(call)
    assert kind == "whole" or not is_read(read_head(text))


# --- a request that goes on ---


def test_headers_change_as_the_router_says() -> None:
    came = [*fields(accept_encoding="br"), ("x-twice", "1"), ("x-twice", "2"), ("x-stays", "1"), ("x-stays", "2")]
    said = b"go\nremove accept-encoding\nremove x-none\nset x-twice:3\nset x-new: a:b \nset x-empty:\n\n"
    asked = told(said, of=came)
    gone = {"accept-encoding", "x-twice"}
    assert asked.sent == [f for f in came if f[0] not in gone] + [("x-twice", "3"), ("x-new", " a:b "), ("x-empty", "")]
    assert asked.passed == BODY
    assert asked.routed_anew


def test_a_header_that_is_removed_and_set_is_set() -> None:
    asked = told(reply(Go(Headers({"x-a": "new"}, ["x-a"]), ()), BODY), of=fields(x_a="old"))
    assert [value for name, value in asked.sent if name == "x-a"] == ["new"]


@pytest.mark.parametrize(
    ("said", "metadata"),
    [
        ([], {}),
        ([("turn", "a-secret")], {"turn": "a-secret", "router": ROUTER}),
        ([("turn", "a-secret"), ("lane", "1"), ("request_id", "a:b")],
         {"turn": "a-secret", "router": ROUTER, "lane": "1", "request_id": "a:b"}),
        ([("request_id", "mine")], {"request_id": "mine"}),  # an answer that nobody looks at has no router
    ],
    ids=str,
)  # fmt: skip
def test_what_the_answer_needs_is_in_the_metadata(said: list[tuple[str, str]], metadata: Mapping[str, str]) -> None:
    asked = told(reply(Go(Headers(), said), BODY))
    assert asked.exchange.metadata == metadata
    assert asked.exchange.override is None


@pytest.mark.parametrize("node", ["10.0.0.2:8200", "[fd00::2]:8200"])
def test_the_node_is_named_so_that_envoy_asks_whether_it_is_alive(node: str) -> None:
    asked = told(b"go\nmeta decode_node:%b\n\n" % node.encode())
    assert asked.exchange.override == (node, False)  # another one does if it is not
    assert asked.exchange.metadata == {}


def test_a_node_that_envoy_knows_by_its_name_only_is_looked_up() -> None:
    asked = told(b"go\nmeta decode_node:node-2:8200\n\n")
    assert asked.exchange.override is None
    assert asked.exchange.metadata == {"decode_node": "node-2:8200"}


def test_a_turn_is_known_to_the_router_that_has_taken_it() -> None:
    first, second = f"10.1.0.1:{ROUTER[-4:]}", f"10.1.0.2:{ROUTER[-4:]}"
    thread = worker(scripts(routers=(first, second))[0])
    answers = {f"kvreturn_calls@{first}": UNREACHABLE, f"kvreturn_calls@{second}": ours(b"go\nmeta turn:t\n\n")}
    for expected in (second, second):  # the first one is down
        asked = Asked(fields(), [BODY], lambda call: answers[call.cluster], on=thread)
        assert asked.exchange.metadata == {"turn": "t", "router": expected}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (b"go\nput 3\n\nnew", b"new"),
        (b"go\nput 0\n\n", b""),
        (b"go\nkeep 0 10\n\n", b"0123456789"),
        (b"go\nkeep 0 1\nput 2\nkeep 9 10\n\n\n\n", b"0\n\n9"),
        (b"go\nput 1\nkeep 2 4\nput 2\nkeep 4 5\n\nabc", b"a23bc4"),
        (b"go\nkeep 5 10\nkeep 0 5\n\n", b"5678901234"),
    ],
    ids=repr,
)
def test_a_body_is_made_of_the_old_one_and_new_bytes(said: bytes, expected: bytes) -> None:
    came = fields(transfer_encoding="chunked")
    asked = told(said, [b"01234", b"56789", b""], came)
    assert asked.passed == expected
    sent = dict(asked.sent)
    assert "transfer-encoding" not in sent
    assert sent["content-length"] == str(len(expected))


_BYTES = st.lists(
    st.one_of(st.binary(max_size=40), st.sampled_from([b"\n\n", b"\n", b"go\n", b"a" * 50, BODY, b'{"a":1}' * 20])),
    max_size=8,
).map(b"".join)


@given(old=_BYTES, new=_BYTES)
def test_any_body_can_become_any_other(old: bytes, new: bytes) -> None:
    check_becomes(old, new)


@given(
    old=_BYTES, edits=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60), st.binary(max_size=60)), max_size=4)
)
def test_a_body_can_be_edited_anywhere(old: bytes, edits: list[tuple[int, int, bytes]]) -> None:
    new = old
    for at, size, put in edits:
        new = new[:at] + put + new[at + size :]
    check_becomes(old, new)


def check_becomes(old: bytes, new: bytes) -> None:
    """The script makes the new body of what the router says to it."""
    asked = told(reply(Go(Headers({"x-a": "\xc3\xa9"}), [("turn", "t")], new), old), [old])
    assert asked.passed == new
    assert dict(asked.sent)["x-a"].encode("latin-1") == "\xc3\xa9".encode()


def test_a_body_that_stays_goes_on_in_its_own_framing() -> None:
    for of in (fields(transfer_encoding="chunked"), fields(content_length=str(len(BODY)))):
        asked = told(reply(Go(Headers(), (), BODY), BODY), of=of)
        assert (asked.sent, asked.passed) == (of, BODY)


@pytest.mark.parametrize("slow", [False, True])
def test_a_body_that_nobody_reads_passes_as_it_comes(slow: bool) -> None:  # noqa: FBT001 - a case of a table
    of = fields("/v1/files", "application/octet-stream", transfer_encoding="chunked")
    asked = Asked(of, [b"a", b"b", b""], lambda _: ours(reply(Go(Headers({"x-a": "b"}), ()), b"")), slow=slow)
    assert (asked.sent, asked.passed) == ([*of, ("x-a", "b")], b"ab")
    assert (asked.errors, asked.response) == ([], None)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    "answer", [ours(reply(Refuse(403, b"no", why="tenant"), b"")), CLOSED], ids=["refused", "closed"]
)
def test_nothing_passes_of_a_body_that_nobody_reads_if_its_request_does_not(answer: Answer, slow: bool) -> None:  # noqa: FBT001
    asked = Asked(fields("/v1/files", "text/plain"), [b"a", b"b", b""], lambda _: answer, slow=slow)
    assert refused(asked)[0] in {403, 500}


@pytest.mark.parametrize("body", [None, [BODY]])
def test_requests_that_have_no_body_to_hide_something_in_are_left_alone(body: Sequence[bytes] | None) -> None:
    of = fields(x_kvreturn_a="1")
    asked = Asked(of, body, lambda _: None, route="plain")
    assert (asked.sent, asked.calls, asked.errors, asked.response) == (of, [], [], None)
    assert asked.exchange.metadata == {}
    assert not asked.routed_anew


# --- a request that does not ---


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
    assert [c.cluster for c in asked.calls] == [f"kvreturn_calls@{router}" for router in THREE[: before + 1]]
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
    assert seen == [f"kvreturn_calls@{router}" for router in itertools.islice(itertools.cycle(THREE), 7)]


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
        (MESSAGES, {"type": "error", "error": {"type": anthropic, "message": text}}),
    ):
        asked = through(*answers, path=path)
        said, headers, body = refused(asked)
        assert (said, headers) == (status, {"content-type": "application/json", "retry-after": "1"})
        assert json.loads(body) == expected
        assert asked.errors == []


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
    [b"", b"go\n", b"go\nset x\n\n", b"go\nput x\n\n", b"go\nkeep 1\n\n", b"answer 99\n\n", b"answer x\n\n"],
    ids=repr,
)
def test_a_request_does_not_pass_where_the_script_cannot_do_as_it_is_told(said: bytes) -> None:
    check_failed(Asked(fields(), [BODY], lambda _: ours(said)))


def test_a_router_that_envoy_has_no_cluster_for_lets_nothing_pass() -> None:
    check_failed(Asked(fields(), [BODY], lambda _: None))


def test_no_body_is_sent_on_that_the_request_does_not_have() -> None:
    check_failed(Asked(fields(), None, lambda _: ours(b"go\nput 1\n\na")))
