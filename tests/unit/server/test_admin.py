"""The admin view: what it shows, and what it never shows, to people and to programs."""

import contextlib
import json
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from kvreturn.config import Settings
from kvreturn.core.handle import read_handle
from kvreturn.core.outcome import Outcome
from kvreturn.server import view
from kvreturn.server.admin import admin_app
from kvreturn.server.board import STEP, STEPS
from kvreturn.store.url import masked_store_url
from support.extproc import Request, Response
from support.harness import DECODE, Clock, Harness, harness, settings
from support.nodes import chat, decode_events, handle
from support.redis import needs_redis, server, sharing
from support.turns import compact

HEADERS = {"content-type": "application/json", "authorization": "Bearer s3cr3t", "x-session-id": "sess-of-mine"}
END = Response(decode_events(params=handle()), node=DECODE)
SECTIONS = ("state", "reuse", "turns", "pools", "store", "returns", "config", "about", "sessions")


@contextlib.asynccontextmanager
async def admin(router: Harness) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(admin_app(router.world, "127.0.0.1"))) as client:
        yield client


async def section(router: Harness, path: str) -> Any:  # noqa: ANN401 - JSON
    async with admin(router) as client:
        answer = await client.get(f"/kvreturn/{path}")
        assert answer.status == 200
        return await answer.json()


async def html(router: Harness) -> str:
    async with admin(router) as client:
        return str(await (await client.get("/")).text())


def request(*contents: str, **members: Any) -> Request:  # noqa: ANN401 - JSON
    return Request(pieces=[chat(*contents, **members)], headers=HEADERS)


async def test_a_turn_is_seen_from_its_first_byte_to_its_last() -> None:
    clock = Clock()
    router = harness(clock=clock)
    envoy = router.envoy()
    assert (await section(router, "turns"))["live"] == []
    await envoy.request(request("Hi"))
    clock.now += 2.5
    (live,) = (await section(router, "turns"))["live"]
    body = chat("Hi")
    assert envoy.upstream.headers
    assert live | {"tenant": "", "session": ""} == {
        "phase": "decode",
        "age": 2.5,
        "quiet": 2.5,
        "api": "chat",
        "model": "m",
        "tenant": "",
        "session": "",
        "outcome": "first_turn",
        "detail": None,
        "status": None,
        "error": None,
        "prefill_node": "10.0.0.1:8100",
        "decode_node": None,
        "request": envoy.upstream.headers["x-request-id"],
        "request_bytes": len(body),
        "response_bytes": 0,
        "prompt": 114,
        "read": None,
        "local": 0,
        "prefill_ms": 0.0,
        "first_token_ms": None,
        "going": None,
        "captured": False,
        "trace": None,
    }
    await envoy.respond(END)
    (live,) = (await section(router, "turns"))["live"]
    assert (live["phase"], live["quiet"], live["status"], live["decode_node"]) == ("streaming", 0.0, 200, DECODE)
    assert live["response_bytes"] == sum(map(len, decode_events(params=handle())))
    await envoy.finish()
    clock.now += 1.5
    seen = await section(router, "turns")
    assert seen["live"] == []
    (ended,) = seen["recent"]
    assert (ended["ago"], ended["phase"], ended["first_token_ms"], ended["captured"]) == (1.5, "ended", 2500.0, True)


async def test_the_last_200_turns_are_remembered() -> None:
    router = harness()
    for i in range(203):
        await router.play(request("Hi", model=f"m{i}"), Response([b"{}"], 404, {"content-type": "application/json"}))
    recent = (await section(router, "turns"))["recent"]
    assert [t["model"] for t in recent] == [f"m{i}" for i in range(202, 2, -1)]
    assert {t["error"] for t in recent} == {"404"}


async def test_the_rate_counts_only_turns_that_could_have_reused_something() -> None:
    clock = Clock(5 * STEP)
    router = harness(clock=clock)
    await router.play(request("Hi"), END)
    clock.now += STEP
    await router.play(request("Hi", "Good morning", "And?"), END)
    await router.play(request("Ho", "Good morning", "And?"), END)
    seen = await section(router, "reuse")
    assert (seen["turns"], seen["continuations"], seen["reused"], seen["rate"]) == (3, 2, 1, 0.5)
    assert seen["outcomes"] == {"first_turn": 1, "hit": 1, "not_a_continuation": 1}
    assert seen["why_not_lately"] == [{"outcome": "not_a_continuation", "detail": "session_known", "turns": 1}]
    assert len(seen["history"]) == STEPS
    assert [[s["turns"], s["continuations"], s["reused"]] for s in seen["history"][-3:]] == [
        [0, 0, 0],
        [1, 0, 0],
        [2, 2, 1],
    ]
    clock.now += STEP * STEPS
    assert sum(s["turns"] for s in (await section(router, "reuse"))["history"]) == 0


@pytest.mark.parametrize(
    ("changes", "on"),
    [
        ({}, True),
        ({"proof": "off"}, False),
        ({"proof": "off", "return": "eager"}, True),
        ({"proof": "off", "models": {"n": {"proof": "connector"}}}, True),
    ],
)
async def test_whether_reuse_is_on(changes: dict[str, Any], on: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    router = Harness(settings(**changes))
    assert (await section(router, "reuse"))["on"] is on
    assert (">off</b>" in await html(router)) is not on


async def test_what_needs_a_look() -> None:
    clock = Clock()
    router = harness(clock=clock)
    assert (await section(router, "state"))["trouble"] == []
    assert "Needs a look" not in await html(router)
    await router.envoy().request(request("Hi"))
    clock.now += 31
    router.world.decode.unreachable(DECODE)
    for _ in range(3):
        router.world.judge.read_failed(read_handle(compact(handle())), hung=True)
    router.world.guard._open()
    router.world.warn_once("KVRETURN_SECRET must be the same everywhere")
    assert (await section(router, "state"))["trouble"] == [
        f"1 of 1 decode nodes are not in use: {DECODE} (out)",
        "the session store is away: turns are cold until it is back",
        "reads from decode engines keep failing (1): their handles are not used for a while",
        "turns in which nothing happens for over 30 s: 1; the longest for 31 s, in phase decode",
        "KVRETURN_SECRET must be the same everywhere",
    ]
    (engine,) = (await section(router, "pools"))["breakers_open"]
    assert re.fullmatch("[0-9a-f]{8}", engine)  # a digest of its id
    store = await section(router, "store")
    assert (store["not_told"], store["breaker_open"], store["records"]) == ("breaker_open", True, None)
    assert "Needs a look" in await html(router)
    await router.world.guard.aclose()


async def test_a_node_of_which_nothing_is_heard_needs_a_look_until_it_answers() -> None:
    router = harness()
    pool = router.world.decode
    for _ in range(3):
        assert (await section(router, "state"))["trouble"] == []
        pool.checked(DECODE, well=False)
    assert (await section(router, "state"))["trouble"] == [
        f"decode nodes of which nothing has been heard yet: {DECODE}"
    ]
    pool.reachable(DECODE)  # a router need not be able to reach decode nodes itself
    pool.checked(DECODE, well=False)
    assert (await section(router, "state"))["trouble"] == []


async def test_what_an_operator_wanted_is_no_trouble() -> None:
    router = harness()
    router.world.decode.drain(DECODE)
    state = await section(router, "state")
    assert (state["trouble"], state["notes"]) == ([], [f"decode nodes that drain: {DECODE}"])
    told = await html(router)
    assert f"<h2>Note</h2><ul><li>decode nodes that drain: {DECODE}</li></ul>" in told
    assert "Needs a look" not in told
    assert "broken" not in told.partition("<h2>Nodes</h2>")[2].partition("</section>")[0]


async def test_the_page_says_which_worker_it_is_of() -> None:
    router = harness(workers=3, store={"url": "redis://localhost:1"}, secret="a secret of these tests")
    router.world.worker = 2
    assert "worker 2 (0 to 2)" in await html(router)
    assert "worker 0 (" not in await html(harness())


@pytest.mark.parametrize(("seconds", "told"), [(0.0, ""), (0.6, ""), (2.34, "about 2.3 s"), (1234.5, "about 1,234 s")])
async def test_time_saved_is_told_where_it_is_known(seconds: float, told: str) -> None:
    router = harness()
    router.world.metrics.saved_seconds.inc(seconds)
    assert re.findall(r"about [\d,.]+ s", await html(router)) == ([told] if told else [])


SECRETS = (
    *("s3cr3t", "sess-of-mine", "a person", "planted words", "Good morning"),  # what clients and models say
    *("chatcmpl-d", "chatcmpl-p", "engine-of-p", "remote_block_ids"),  # handles
    *("a secret of these tests", "pa55", "k3y", "us3r"),
)


@pytest.mark.parametrize("path", ["/", *(f"/kvreturn/{name}" for name in SECTIONS)])
async def test_no_contents_ids_handles_or_secrets_are_shown(path: str) -> None:
    shared = {"store": {"encryption_key": "k3y", "url": "rediss://us3r:pa55@10.0.0.9/0?ssl_ca_certs=/p/pa55"}}
    router = harness()
    router.world.settings = settings(**shared)
    for contents in (("planted words",), ("planted words", "Good morning", "And?")):
        await router.play(request(*contents, user="a person", metadata={"user_id": "a person"}), END)
    await router.envoy().request(request("planted words", user="a person"))
    async with admin(router) as client:
        text = await (await client.get(path)).text()
    assert [word for word in SECRETS if word in text] == []
    assert not any(digest.hex() in text for digest in (router.world.key, router.world.scope(HEADERS).tenant))


URLS = [
    ("redis://10.0.0.9", "redis://10.0.0.9"),
    ("redis://:pw@h:6379/0", "redis://***@h:6379/0"),
    ("redis+cluster://u:p%40@a,b:7000", "redis+cluster://***@a,b:7000"),
    ("unix://u:p@/run/r.sock?db=3", "unix://***@/run/r.sock?db=***"),
    (
        "redis+sentinel://u:p@a,b/main/2?sentinel_username=su&sentinel_password=sp",
        "redis+sentinel://***@a,b/main/2?sentinel_username=***&sentinel_password=***",
    ),
]


@pytest.mark.parametrize(("url", "shown"), URLS)
def test_a_stores_url_is_shown_without_what_is_secret_in_it(url: str, shown: str) -> None:
    assert masked_store_url(url) == shown
    told = {s["name"]: s for s in view.config(settings(store={"url": url}))}
    assert told["store.url"] == {"name": "store.url", "value": shown, "changed": True}


def test_all_settings_are_told_and_which_are_not_the_defaults() -> None:
    plain = settings(models={"n": {"proof": "off"}}, limits={"min_tokens": 7}, admin="127.0.0.1:9091")
    told = {s["name"]: s for s in view.config(plain)}
    assert told["secret"] == {"name": "secret", "value": "**********", "changed": True}
    assert told["store.encryption_key"] == {"name": "store.encryption_key", "value": "", "changed": False}
    assert told["limits.min_tokens"] == {"name": "limits.min_tokens", "value": 7, "changed": True}
    assert told["store.ttl"] == {"name": "store.ttl", "value": 450.0, "changed": False}
    assert told["return"] == {"name": "return", "value": "lazy", "changed": False}
    assert told["models"]["value"] == {"n": {"proof": "off", "return": None}}
    changed = {name for name, s in told.items() if s["changed"] and not name.startswith("pools.")}
    assert changed == {"secret", "models", "limits.min_tokens", "prefill.via"}
    assert {name.partition(".")[0] for name in told} == {f.alias or n for n, f in Settings.model_fields.items()}


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg/onload=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></details><main>",
    "&lt;b&gt;&#x27;",
    "\u202egnp\u202c\x00\ud800",
]


class Tags(HTMLParser):
    """What a browser would make of a page: its elements, and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", HOSTILE, ids=repr)
async def test_whatever_a_client_calls_its_model_is_just_text(name: str) -> None:
    async def shown(model: str) -> Tags:
        router = harness()
        await router.play(request("Hi", model=model), END)
        await router.envoy().request(request("Ho", model=model))
        router.world.warn_once(f"said of {model.encode(errors='replace').decode()}")
        return Tags(await html(router))

    plain, hostile = await shown("m"), await shown(name)
    assert hostile.tags == plain.tags
    assert hostile.attributes == plain.attributes
    assert not any(attribute.startswith(("on", "style", "href", "src")) for attribute in hostile.attributes)


async def test_the_page_may_load_and_run_nothing_but_itself() -> None:
    async with admin(harness()) as client:
        answer = await client.get("/")
        text, policy = await answer.text(), answer.headers["content-security-policy"]
    assert answer.content_type == "text/html"
    for part in ("default-src 'none'", "connect-src 'self'", "form-action 'none'", "frame-ancestors 'none'"):
        assert part in policy
    assert "unsafe" not in policy
    assert "http" not in text.replace("kvreturn/", "")
    assert not set(Tags(text).tags) & {"link", "img", "iframe", "form", "object", "base"}


async def test_sessions_are_a_bounded_page_of_digests() -> None:
    router = harness()
    for i in range(5):
        await router.play(request(f"Hi {i}"), END)
    seen = (await section(router, "sessions?limit=3"))["sessions"]
    assert len(seen) == 3
    assert {len(one["name"]) for one in seen} == {16}
    (recent, *_) = (await section(router, "turns"))["recent"]
    assert {one["conversation"] for one in seen if one["handle"]} == {recent["session"]}
    assert len((await section(router, f"sessions?limit={'9' * 30}"))["sessions"]) == 6  # and where the session was
    assert (await section(router, "sessions?limit=0"))["sessions"] == []
    async with admin(router) as client:
        for limit in ("-1", "x", "", "²"):
            assert (await client.get("/kvreturn/sessions", params={"limit": limit})).status == 400


async def test_a_section_that_does_not_exist_says_which_do() -> None:
    async with admin(harness()) as client:
        answer = await client.get("/kvreturn/nothing")
        assert answer.status == 404
        told = (await answer.json())["error"]["message"]
    assert [name for name in SECTIONS if name not in told] == []


async def test_what_is_told_is_json_whatever_clients_write() -> None:
    router = harness()
    await router.play(request("Hi", model="m\ud800\n\x1b[31m"), END)
    (turn,) = (await section(router, "turns"))["recent"]
    assert turn["outcome"] == Outcome.FIRST_TURN
    assert json.dumps(turn["model"]).isascii()
    assert turn["model"] == "m???[31m"


@needs_redis
async def test_what_is_told_of_redis(tmp_path: Path) -> None:
    with server(tmp_path) as redis:
        async with sharing(f"redis://:pa55@127.0.0.1:{redis.port}") as refused:
            assert (await section(refused, "store"))["breaker_open"]
        async with sharing(redis.url) as router:
            await router.play(request("Hi"), END)
            told = await section(router, "store")
            assert (told["kind"], told["url"], told["not_told"]) == ("redis", redis.url, None)
            assert told["records"] > 3
            assert {"take", "put"} <= told["milliseconds"].keys()
            seen = (await section(router, "sessions"))["sessions"]
            assert sorted(one["handle"] for one in seen) == [False, True]
            assert "Good morning" not in json.dumps(seen)
            allowed = ("~kvr1*", "+@all", "-scan")
            assert redis.ask("ACL", "SETUSER", "default", "resetkeys", *allowed).startswith(b"+OK")
            assert (await section(router, "store"))["not_told"] is None
            denied = await section(router, "sessions")
            assert denied["sessions"] == []
