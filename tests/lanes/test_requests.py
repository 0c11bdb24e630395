"""How the fast lane's script has requests: what the router is told of them, and that it is done as the router says."""

import base64
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.core.api import APIS
from kvreturn.server.called import Go, read_head, reply
from kvreturn.server.intake import is_read
from kvreturn.server.messages import Headers
from support.asked import BODY, CHAT, Asked, Fields, fields
from support.lanes import ROUTER, UNREACHABLE, Call, ours, scripts, worker


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
    assert (call.cluster, call.body, call.waited) == (f"kvreturn_requests@{ROUTER}", BODY, True)
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
    answers = {f"kvreturn_requests@{first}": UNREACHABLE, f"kvreturn_requests@{second}": ours(b"go\nmeta turn:t\n\n")}
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


def test_nothing_of_a_body_is_left_for_the_next_request() -> None:
    thread, large = worker(scripts()[0]), b"x" * (5 << 20)  # more than what is kept for the next one
    cases = [
        (b"go\nput 3\n\nabc", b"abc"),
        (b"go\nput 5\nkeep 0 99\n\nwrong", None),
        (b"go\nput %d\nkeep 0 1\n\n%b" % (len(large), large), large + BODY[:1]),
        (b"answer 403\n\nput 1", None),
        (b"go\nkeep 1 3\n\n", BODY[1:3]),
        (b"go\n\n", BODY),
    ]
    answers = iter([ours(said) for said, _ in cases])
    for _, expected in cases:
        asked = Asked(fields(), [BODY], lambda _: next(answers), on=thread)
        assert (asked.response is None) == (expected is not None)
        assert asked.passed == (expected or b"")


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


def by_method(method: str) -> list[tuple[str, str]]:
    return [(name, method if name == ":method" else value) for name, value in fields(x_kvreturn_a="1")]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("body", [None, [BODY]])
def test_requests_that_have_no_body_to_hide_something_in_are_left_alone(
    method: str, body: Sequence[bytes] | None
) -> None:
    of = by_method(method)
    asked = Asked(of, body, lambda _: None, route="plain")
    assert (asked.sent, asked.calls, asked.errors, asked.response) == (of, [], [], None)
    assert asked.exchange.metadata == {}
    assert not asked.routed_anew


@pytest.mark.parametrize(
    ("method", "route"),
    [("POST", "plain"), ("DELETE", "plain"), ("", "plain"), ("GET", "stored"), ("GET", "inference")],
)
def test_a_route_of_that_name_is_not_enough(method: str, route: str) -> None:
    assert len(Asked(by_method(method), None, route=route).calls) == 1
