"""Metrics and log lines: what they count and say, and what they never tell."""

import asyncio
import logging
import re
import time
from typing import Any

import pytest

from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Reply
from kvreturn.telemetry.loop import watching
from kvreturn.telemetry.metrics import Metrics
from support.extproc import Request, Response
from support.harness import DECODE, Clock, Harness, harness, live
from support.nodes import (
    FakePrefill,
    Script,
    answer,
    carried_handle,
    chat,
    connector,
    decode_body,
    decode_events,
    handle,
    in_turn,
    prefill_body,
    prefill_params,
    replies,
    report,
)

TURN = Request(pieces=[chat("Hi")])
NEXT = Request(pieces=[chat("Hi", "Good morning", "And?")])
END = Response(decode_events(params=handle()), node=DECODE)

NAMES = {
    "kvreturn_nodes",
    "kvreturn_node_ejections_total",
    "kvreturn_discovery_errors_total",
    "kvreturn_breakers_open",
    "kvreturn_answers_streamed_total",
    "kvreturn_capture_failures_total",
    "kvreturn_computed_tokens_total",
    "kvreturn_decode_duration_seconds",
    "kvreturn_event_loop_lag_seconds",
    "kvreturn_frees_total",
    "kvreturn_handle_age_seconds",
    "kvreturn_config_envoy_outdated",
    "kvreturn_config_refused",
    "kvreturn_config_restart_needed",
    "kvreturn_config_last_success_timestamp_seconds",
    "kvreturn_config_reloads_total",
    "kvreturn_handles_captured_total",
    "kvreturn_handles_missing_total",
    "kvreturn_info",
    "kvreturn_live_streams",
    "kvreturn_live_turns",
    "kvreturn_oversize_events_total",
    "kvreturn_prefill_blocks_stranded_total",
    "kvreturn_prefill_duration_seconds",
    "kvreturn_prefill_fallbacks_total",
    "kvreturn_prefill_retries_total",
    "kvreturn_prefill_saved_seconds_total",
    "kvreturn_prefill_saved_tokens_total",
    "kvreturn_prompt_tokens_total",
    "kvreturn_read_back_tokens_total",
    "kvreturn_requests_refused_total",
    "kvreturn_return_choices_total",
    "kvreturn_return_duration_seconds",
    "kvreturn_return_recalls_total",
    "kvreturn_returned_tokens_total",
    "kvreturn_returns_running",
    "kvreturn_returns_total",
    "kvreturn_returns_waiting",
    "kvreturn_router_added_seconds",
    "kvreturn_sessions",
    "kvreturn_sessions_size_bytes",
    "kvreturn_sessions_evicted_total",
    "kvreturn_sessions_expired_total",
    "kvreturn_sessions_over_limit_total",
    "kvreturn_store_breaker_open",
    "kvreturn_store_duration_seconds",
    "kvreturn_store_errors_total",
    "kvreturn_tasks",
    "kvreturn_time_to_first_token_seconds",
    "kvreturn_turn_errors_total",
    "kvreturn_turns_incomplete_total",
    "kvreturn_turns_total",
}


async def test_the_names_of_all_metrics() -> None:
    text = harness().world.metrics.expose().decode()
    told = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert {n for n in told if not n.startswith("process_")} == NAMES


async def test_both_conventions_have_a_name_for_each_of_them() -> None:
    made = harness().world.metrics.all
    assert {i.prometheus for i in made.values()} == NAMES
    assert len({i.otel for i in made.values()}) == len(NAMES)
    told = {i.prometheus: (i.otel, i.unit, i.kind) for i in made.values()}
    assert told["kvreturn_turns_total"] == ("kvreturn.turns", "{turn}", "counter")
    assert told["kvreturn_store_duration_seconds"] == ("kvreturn.store.duration", "s", "histogram")
    assert told["kvreturn_sessions_size_bytes"] == ("kvreturn.sessions.size", "By", "gauge")
    assert told["kvreturn_sessions"] == ("kvreturn.sessions", "{record}", "gauge")


def reported(**told: Any) -> Script:  # noqa: ANN401 - as `report`
    """P with our connector, which says this of each handle."""

    def script(body: bytes) -> Reply:
        if carried_handle(body) is None:
            return connector(body)
        return answer(prefill_body(prefill_params(**report(**told))))(body)

    return script


REPORTS: list[tuple[Script, Outcome, int]] = [
    (reported(proven=160, read=160), Outcome.HIT, 160),
    (reported(proven=96, read=96), Outcome.PARTIAL_HIT, 96),
    (reported(proven=160, read=0, local=170, reason="local_hit"), Outcome.LOCAL_HIT, 0),
    (reported(proven=0, read=0, reason="not_a_continuation"), Outcome.NOT_A_CONTINUATION, 0),
    (reported(proven=160, read=0, reason="expired"), Outcome.EXPIRED, 0),
    (reported(proven=160, read=0, reason="node_gone"), Outcome.NODE_GONE, 0),
    (reported(proven=0, read=0, reason="a reason of tomorrow"), Outcome.UNPROVEN, 0),
    (answer(), Outcome.UNPROVEN, 0),  # a stock P ignores a sealed handle
]


@pytest.mark.parametrize(("script", "outcome", "read"), REPORTS)
async def test_what_p_reports_becomes_the_outcome(script: Script, outcome: Outcome, read: int) -> None:
    router = harness(script)
    await router.play(TURN, END)
    await router.play(NEXT, END)
    assert router.outcomes() == {"first_turn": 1, outcome.value: 1}
    assert router.metric("read_back_tokens_total") == read
    assert router.metric("prompt_tokens_total") == 2 * 114
    assert router.metric("prefill_saved_tokens_total") == read
    assert router.metric("handles_captured_total") == 2


async def test_what_a_good_turn_counts() -> None:
    clock = Clock()
    router = harness(clock=clock)
    envoy = router.envoy()
    await envoy.request(TURN)
    assert router.metric("live_streams") == 1
    clock.now += 0.3
    await envoy.respond(END)
    await envoy.finish()
    assert router.metric("live_streams") == 0
    assert router.metric("turns_total", outcome="first_turn", api="chat", model="m") == 1
    assert router.metric("time_to_first_token_seconds_bucket", outcome="first_turn", streamed="true", le="0.2") == 0
    assert router.metric("time_to_first_token_seconds_bucket", outcome="first_turn", streamed="true", le="0.5") == 1
    assert router.metric("prefill_duration_seconds_count") == 1
    assert router.metric("sessions") == 1
    assert router.metric("sessions_size_bytes") > 0
    for name in NAMES - {"kvreturn_turn_errors_total", "kvreturn_store_errors_total"}:
        if re.search(r"incomplete|failures|missing|stranded|retries|fallbacks|oversize|evicted|expired", name):
            assert router.metric(name.removeprefix("kvreturn_")) == 0, name


async def test_a_turn_of_ds_alone_has_no_prefill_leg_to_time() -> None:
    router = harness()
    request = Request("/v1/responses", [b'{"model":"m","input":"Hi","background":true}'])
    await router.play(request, Response([b"{}"], headers={"content-type": "application/json"}))
    assert router.outcomes() == {"decode_alone": 1}
    assert router.metric("prefill_duration_seconds_count") == 0
    assert router.metric("decode_duration_seconds_count") == 1


async def test_what_waits_for_others_is_not_what_the_router_adds() -> None:
    clock = Clock()

    def slow(body: bytes) -> Reply:
        clock.now += 0.3
        return connector(body)

    router = harness(slow, clock)
    store: Any = router.world.store
    take, put = store.take, store.put

    async def slow_take(*args: Any) -> Any:  # noqa: ANN401 - as `SessionStore.take`
        clock.now += 0.004
        return await take(*args)

    async def slow_put(*args: Any) -> Any:  # noqa: ANN401 - as `SessionStore.put`
        clock.now += 0.015
        return await put(*args)

    store.take, store.put = slow_take, slow_put
    await router.play(TURN, END)
    for side, least, enough in (("request", "0.002", "0.005"), ("response", "0.01", "0.02")):
        counted = [router.metric("router_added_seconds_bucket", side=side, le=le) for le in (least, enough, "+Inf")]
        assert counted == [0, 1, 1], side
    assert router.metric("prefill_duration_seconds_sum") == pytest.approx(0.3)
    assert router.metric("decode_duration_seconds_sum") == pytest.approx(0.015)


async def test_how_old_handles_are_when_they_are_used() -> None:
    clock = Clock()
    router = harness(clock=clock)
    await router.play(TURN, END)
    clock.now += 42
    await router.play(NEXT, END)
    assert router.metric("handle_age_seconds_count") == 1
    assert router.metric("handle_age_seconds_sum") == pytest.approx(42)


async def test_a_loop_that_is_held_up_shows() -> None:
    metrics = Metrics()
    async with watching(metrics.loop_lag):
        await asyncio.sleep(0.05)
        time.sleep(0.35)  # noqa: ASYNC251 - that is what is looked for
        await asyncio.sleep(0.01)
    assert metrics.value("kvreturn_event_loop_lag_seconds_count") == 1
    assert metrics.value("kvreturn_event_loop_lag_seconds_sum") >= 0.1


async def test_how_the_router_is_set_up_is_told_without_secrets() -> None:
    changes: dict[str, Any] = {"proof": "trusted", "return": "eager"}
    text = harness(**changes).world.metrics.expose().decode()
    (line,) = [x for x in text.splitlines() if x.startswith("kvreturn_info{")]
    labels = 'prefill_via="direct",proof="trusted",return="eager",store="memory"'
    assert labels in ",".join(sorted(line[len("kvreturn_info{") : -len("} 1.0")].split(",")))


MISSING = [
    ("SSE without a handle", Response(decode_events())),
    ("JSON without a handle", Response([decode_body()], headers={"content-type": "application/json"})),
    ("a handle without blocks", Response(decode_events(params=handle(remote_block_ids=[[]])))),
]


@pytest.mark.parametrize("response", [m[1] for m in MISSING], ids=[m[0] for m in MISSING])
async def test_a_turn_without_a_handle_is_counted_and_the_next_one_says_why(response: Response) -> None:
    """field report 53: vLLM 0.32.0 sends none in streams."""
    router = harness()
    await router.play(TURN, response)
    assert router.metric("handles_missing_total") == 1
    assert router.metric("handles_captured_total") == 0
    await router.play(NEXT, END)
    assert router.outcomes() == {"first_turn": 1, "no_handle_from_decode": 1}


async def test_expiry_and_eviction_are_counted() -> None:
    clock = Clock()
    router = harness(clock=clock, store={"max_entries": 2})
    for i in range(3):
        await router.turn(f"Hi {i}")
    assert router.metric("sessions_evicted_total") == 1
    clock.now += 451
    await router.turn("Hi 2", "Good morning", "And?")
    assert router.outcomes() == {"first_turn": 3, "expired": 1}
    assert router.metric("sessions_expired_total") == 2


async def test_an_oversize_event_is_counted() -> None:
    router = harness(limits={"event_bytes": 2000})
    events = decode_events(params=handle(remote_block_ids=[list(range(1000))]))
    pieces = [e[i : i + 500] for e in events for i in range(0, len(e), 500)]
    envoy = await router.play(TURN, Response(pieces))
    assert envoy.client.body == b"".join(decode_events())
    assert router.metric("oversize_events_total") == 1
    assert router.handles == 0


async def test_models_are_labels_only_once_a_node_has_answered_to_them() -> None:
    """A client could write anything there, in any number (field report 119)."""
    router = harness()
    for i in range(50):
        refusal = Response([b"{}"], 404, {"content-type": "application/json"})
        await router.play(Request(pieces=[chat("Hi", model=f"my secret {i}")]), refusal)
    for i in range(50):
        await router.play(Request(pieces=[chat("Hi", model=f"real-{i}")]), END)
    text = router.world.metrics.expose().decode()
    labels = set(re.findall(r'kvreturn_turns_total\{.*model="([^"]*)"', text))
    assert labels == {"other", *(f"real-{i}" for i in range(32))}


async def test_an_exception_for_one_model_hides_no_other_in_the_metrics() -> None:
    router = harness(models={"m": {"proof": "off"}})
    await router.play(TURN, END)
    await router.play(Request(pieces=[chat("Hi", model="another")]), END)
    await router.play(TURN, Response([b"{}"], 500, {"content-type": "application/json"}))
    assert router.metric("turns_total", outcome="disabled", api="chat", model="m") == 2
    assert router.metric("turns_total", outcome="first_turn", api="chat", model="another") == 1


async def test_one_line_for_each_turn(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvreturn.turn")
    clock = Clock()

    def slow(body: bytes) -> Reply:
        clock.now += 0.125
        return connector(body)

    router = harness(slow, clock)
    await router.play(TURN, END)
    envoy = router.envoy()
    await envoy.request(NEXT)
    clock.now += 0.25
    await envoy.respond(END)
    await envoy.finish()
    await router.play(Request(pieces=[b"{}"]), END)
    await router.play(Request("/v1/models", method="GET"), END)
    lines = [r.getMessage() for r in caplog.records if r.name == "kvreturn.turn"]
    assert envoy.upstream.headers
    assert f" request={envoy.upstream.headers['x-request-id']}" in lines[1]
    first, second, refused = (re.sub("request=[0-9a-f]{32}", "request=ID", line) for line in lines)
    assert first == (
        "outcome=first_turn api=chat model=m status=200 prompt=114 read=- local=0 returned=- prefill_ms=125.0 "
        "first_token_ms=125.0 total_ms=125.0 retries=0 fallback=False captured=True lane=portable return=- session=- "
        f"prefill_node=10.0.0.1:8100 decode_node={DECODE} request=ID"
    )
    assert second == (
        "outcome=hit api=chat model=m status=200 prompt=114 read=160 local=0 returned=- prefill_ms=125.0 "
        "first_token_ms=375.0 total_ms=375.0 retries=0 fallback=False captured=True lane=portable return=- session=- "
        f"prefill_node=10.0.0.1:8100 decode_node={DECODE} request=ID"
    )
    assert refused == (
        "outcome=rejected api=chat model=- status=400 prompt=- read=- local=- returned=- prefill_ms=0.0 "
        "first_token_ms=- total_ms=0.0 retries=0 fallback=False captured=False lane=- return=- session=- "
        "prefill_node=- decode_node=- request=ID error=400"
    )


async def test_a_log_line_stays_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvreturn.turn")
    router = harness()
    await router.play(Request(pieces=[chat("Hi", model="m\nturn outcome=hit " + "x" * 100)]), END)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "kvreturn.turn"]
    assert "\n" not in line
    assert "model=m?turn?outcome=hit?xxx" in line
    assert len(line) < 400


SECRETS = (
    *("engine-of-d", "engine-of-p", "chatcmpl-d", "chatcmpl-p"),  # handles
    *("10.0.0.1", "10.0.0.2", "127.0.0.1"),  # nodes, but for the members of a turn's line that are made for them
    *("evil", "planted", "Good morning", "s3cr3t"),  # what clients and models say
)


async def converse(router: Harness) -> None:
    """Turns that end in all kinds of ways, each with things in it that are nobody else's business."""
    params = {"remote_host": "evil.example", "remote_engine_id": "evil"}
    headers = {
        "content-type": "application/json",
        "authorization": "Bearer s3cr3t",
        "x-request-id": "planted-id",
        "x-kvreturn-node": "evil.example:1",
    }

    async def play(body: bytes, response: Response = END, path: str = "/v1/chat/completions") -> None:
        await router.play(Request(path, [body], headers=headers), response)

    await play(chat("planted", kv_transfer_params=params, model="planted model"))
    await play(chat("planted", "Good morning", "planted", model="planted model", vllm_xargs=params))
    await play(b'{"planted": ')
    await play(b'{"messages": "planted"}')
    await play(b'{"messages": [{"role": "planted", "content": "planted"}], "model": ["planted"]}')
    await play(b'{"kv_transfer_params": {"planted"', path="/v1/embeddings")
    await play(chat("planted"), Response([b'{"error": {"message": "planted evil"}}'], 400, {"content-type": "a/b"}))
    await play(chat("planted"), Response([b'data: {"error": {"message": "planted", "code": 7}}\n\n']))
    await play(chat("planted"), Response([b"planted"], headers={"content-encoding": "gzip", "content-type": "a/b"}))
    await play(chat("planted"), Response([b"planted"], headers={"content-encoding": "br", "content-type": "a/b"}))
    await play(chat("planted"), Response(decode_events(params=handle(remote_port="planted"))[:3]))


async def test_nothing_that_is_nobodys_business_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bad = replies(b'{"error": "planted, by evil at 10.0.0.1"}', 500)
    node = FakePrefill(in_turn(replies(), replies(), bad, bad, replies(b"planted", 404), replies()))
    async with node, live(node) as router:
        await converse(router)
        told = caplog.text + router.world.metrics.expose().decode()
    told = re.sub(r" (prefill|decode)_node=\S+", "", told)
    # A model's name is told once a node has answered to it; `_created` samples are times, which hold any digits.
    shown = re.compile(r"planted\?model|model=\"planted model\"|^kvreturn_\w+_created")
    lines = [line for line in told.splitlines() if not shown.search(line)]
    assert len(lines) > 50
    for secret in SECRETS:
        assert not [line for line in lines if secret in line], secret
