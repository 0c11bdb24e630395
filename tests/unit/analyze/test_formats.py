"""What lines of all kinds tell, and what of a bad one is said."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreturn.analyze import lines as lines_module
from kvreturn.analyze.formats import LineReader
from kvreturn.analyze.lines import InputError, read_lines, total_size
from kvreturn.analyze.observation import LineError, Measured, Observation
from kvreturn.core.outcome import Outcome
from support.logs import logged, named, result

NOON = 1_767_268_800  # 2026-01-01T12:00:00Z


def read(row: Any) -> Observation | Measured | None:  # noqa: ANN401 - JSON
    return LineReader().read((row if isinstance(row, str) else json.dumps(row)).encode())


def turn(row: Any) -> Observation:  # noqa: ANN401 - JSON
    found = read(row)
    assert isinstance(found, Observation)
    return found


# --- times and counts ---


@pytest.mark.parametrize(
    "ts",
    [
        NOON,
        NOON * 1_000,
        NOON * 10**6,
        NOON * 10**9,
        str(NOON),
        "2026-01-01T12:00:00Z",
        "2026-01-01 12:00:00",
        "2026-01-01T13:00:00.000+01:00",
        "2026-01-01T12:00:00.000000000Z",
    ],
)
def test_a_time_may_be_in_any_unit_or_iso_8601(ts: float | str) -> None:
    assert turn(named("c", ts, 7)).ts == NOON


def test_a_unit_that_was_told_is_not_guessed() -> None:
    found = LineReader("ms").read(json.dumps(named("c", 1_500, 7)).encode())
    assert isinstance(found, Observation)
    assert found.ts == 1.5


@pytest.mark.parametrize(
    ("row", "sizes"),
    [
        ({"prompt_tokens": 7}, (7, None, None)),
        ({"input_tokens": "7", "output_tokens": 3}, (7, 3, None)),
        ({"prompt_tokens": None, "input_length": 7.0}, (7, None, None)),
        ({"usage": {"prompt_tokens": 7, "completion_tokens": 3}}, (7, 3, None)),
        ({"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}}, (7, None, 4)),
        ({"gen_ai.usage.input_tokens": 7, "gen_ai.usage.cache_read.input_tokens": 0}, (7, None, 0)),
    ],
)
def test_token_counts_go_by_the_names_that_loggers_give_them(
    row: dict[str, Any], sizes: tuple[int | None, ...]
) -> None:
    found = turn({"session_id": "s", "timestamp": 1} | row).sizes
    assert (found.prompt, found.completion, found.cached) == sizes


def test_of_a_member_that_is_there_twice_the_last_one_counts() -> None:
    assert turn('{"ts": 1, "ts": 7, "prompt_tokens": 4, "conversation_id": "c"}').ts == 7


# --- what cannot be used ---


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("hello", "neither JSON nor"),
        ('{"ts": 1', "not JSON"),
        ("[1]", "neither JSON nor"),
        ({"ts": 1, "prompt_tokens": 7}, "no `conversation_id`"),
        (named("", 1, 7), "no `conversation_id`"),
        (named(None, 1, 7), "no `conversation_id`"),
        ({"ts": 1, "conversation_id": "c"}, "no `prompt_tokens`"),
        ({"conversation_id": "c", "prompt_tokens": 7}, "no time"),
        (named("c", "yesterday", 7), "time (`ts`) cannot be read"),
        (named("c", -1, 7), "time (`ts`) cannot be read"),
        ({"conversation_id": "c", "ts": [], "prompt_tokens": 7}, "time (`ts`) cannot be read"),
        ('{"conversation_id": "c", "ts": NaN, "prompt_tokens": 7}', "time (`ts`) cannot be read"),
        ('{"conversation_id": "c", "ts": 1, "prompt_tokens": 1e999}', "`prompt_tokens` is not a number"),
        ({"conversation_id": "c", "ts": True, "prompt_tokens": 7}, "time (`ts`) cannot be read"),
        (named("c", 1, -7), "`prompt_tokens` is not a number"),
        ({"conversation_id": "c", "ts": 1, "prompt_tokens": 7.5}, "`prompt_tokens` is not a number"),
        ({"conversation_id": "c", "ts": 1, "prompt_tokens": "many"}, "`prompt_tokens` is not a number"),
        (named("c", 1, 2**31), "`prompt_tokens` is not a number"),
        ({"ts": 1, "messages": []}, "a request that no node would take"),
        ({"ts": 1, "messages": ["hi"]}, "a request that no node would take"),
        ({"timestamp": 0, "hash_ids": [1], "input_length": 1_024}, "`hash_ids` does not fit"),
        ({"timestamp": 0, "hash_ids": 3, "input_length": 1_024}, "`hash_ids` does not fit"),
        ({"timestamp": 0, "hash_ids": []}, "no `input_length`"),
        ("2026-01-01 12:00:00,000 INFO kvreturn.turn outcome=lost api=chat", "an outcome in it that kvreturn"),
        ("2026-01-01 12:00:00,000 INFO kvreturn.turn api=chat", "a turn without an outcome"),
        (
            {"ts": "2026-01-01T12:00:00Z", "level": "info", "logger": "kvreturn.turn", "outcome": "lost"},
            "an outcome in it",
        ),
    ],
)
def test_a_line_that_cannot_be_used_is_named_and_the_rest_goes_on(row: Any, reason: str) -> None:  # noqa: ANN401 - JSON
    with pytest.raises(LineError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        read(row)
    got = result([named("c", 0, 10), row, named("c", 1, 20)])
    assert (got["turns"], got["follow_up_turns"], got["bad_lines"]) == (2, 1, 1)
    assert [(b["lines"], b["first"]) for b in got["bad"]] == [(1, ["log:2"])]
    assert reason in got["bad"][0]["reason"]


_junk = st.one_of(
    st.text(),
    st.dictionaries(
        st.sampled_from(
            ["ts", "conversation_id", "prompt_tokens", "messages", "prompt", "hash_ids", "usage", "request"]
        )
        | st.sampled_from(
            ["response", "bytes_received", "response_code", "path", "input_length", "start_time", "model"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=5,
        ),
    ),
)


@settings(max_examples=60)
@given(st.lists(_junk, max_size=5))
def test_no_line_whatever_is_in_it_stops_the_analysis_or_hides_a_good_one(rows: list[Any]) -> None:
    texts = [(row if isinstance(row, str) else json.dumps(row)) for row in rows]
    got = result([*texts, named("a name that no junk has", 5, 10), named("a name that no junk has", 6, 20)])
    assert got["lines"] == len(rows) + 2
    assert got["turns"] + got["bad_lines"] + got["other_lines"] + sum(got["outcomes"].values()) == got["lines"]
    assert got["follow_up_turns"] >= 1
    json.dumps(got, allow_nan=False)


# --- text logs ---


def test_a_turn_log_line_tells_what_the_router_measured() -> None:
    text = (
        "2026-01-01 12:00:00,123 INFO kvreturn.turn outcome=below_threshold(short) api=chat model=m status=200 "
        "prompt=120 read=- local=80 prefill_ms=12.5 first_token_ms=30.1 retries=0 fallback=False captured=True "
        "prefill_node=10.0.0.1:8000 decode_node=- request=0a4f"
    )
    assert read(text) == Measured(Outcome.BELOW_THRESHOLD, prompt=120, read=None, local=80)


def test_a_turn_log_line_in_json_tells_the_same() -> None:
    line = {"ts": "2026-01-01T12:00:00.123+00:00", "level": "info", "logger": "kvreturn.turn", "outcome": "hit"}
    line |= {"prefill_node": "10.0.0.1:8000", "request": "0a4f"}
    assert read({**line, "detail": "x", "model": "m", "prompt": 120, "read": 96}) == Measured(
        Outcome.HIT, 120, 96, None
    )
    for wrong in ("lost", None, ["hit"]):
        with pytest.raises(LineError, match="an outcome in it that kvreturn"):
            read({**line, "outcome": wrong})
    assert read({**line, "prompt": "many", "read": -1, "local": True}) == Measured(Outcome.HIT, None, None, None)


@pytest.mark.parametrize(
    "rows",
    [
        ["2026-11-29 23:35:48,652 INFO kvreturn listening on 127.0.0.1:9090"],
        ["2026-11-29 23:35:48,652 WARNING worker 1 kvreturn store put failed: timeout"],
        ["2026-11-29 23:56:30,054 INFO worker 0 kvreturn.turn leg=decode api=chat model=m status=200 captured=True"],
        ["2026-11-29 23:56:30,054 INFO kvreturn.return result=returned tokens=9"],
        ["  router | 2026-11-29 23:56:05,801 INFO kvreturn worker 0 is process 27637"],
        ["  router | Error: this needs redis", "kvreturn | ready: http://127.0.0.1:8000/v1"],
        ["   envoy | 23:56:29.230 10.0.0.1 POST /v1/chat/completions HTTP/1.1 -> 200 - node=10.0.0.2:80 in=1 out=2"],
        ["23:56:29.230 10.0.0.1 POST /v1/completions HTTP/1.1 -> 200 DC node=- first=-ms all=1ms in=1 out=2"],
        ["2026-11-29T23:56:29.230Z client 10.0.0.1 POST /v1/completions HTTP/2 -> 200 - node=- in=1 out=2 request=a"],
        ["23:56:29.230 warning ext_proc: something"],
        ["[2026-11-29 23:56:29.230][12][warning][ext_proc] [source/x.cc:1] something"],
        [
            "router-1  | 2026-11-29 23:35:48,652 ERROR kvreturn could not settle a turn",
            "Traceback (most recent call last):",
            '  File "x.py", line 1, in f',
            "ValueError: no",
        ],
        ['{"ts":"2026-11-29T23:52:07.008+00:00","level":"info","logger":"kvreturn","message":"listening"}'],
        ['{"ts":"2026-11-29T23:52:07.008+00:00","level":"info","logger":"kvreturn.return","result":"x","tokens":9}'],
        ['{"ts":"2026-11-29T23:52:07.008+00:00","level":"info","logger":"kvreturn.turn","leg":"decode","api":"chat"}'],
        ['{"ts":"2026-11-29T23:52:07.008+00:00","level":"info","logger":"envoy","message":"in=1 out=2"}'],
        ['{"ts":"2026-11-29T23:52:07.008+00:00","level":"error","logger":"asyncio","worker":1,"message":"x"}'],
    ],
)
def test_what_else_kvreturn_logs_is_no_bad_line(rows: list[str]) -> None:
    turn_line = "2026-11-29 23:35:54,630 INFO worker 0 kvreturn.turn outcome=hit api=chat prompt=120 read=96 local=0"
    got = result([turn_line, *rows, turn_line])
    assert (got["turns"], got["other_lines"], got["bad"]) == (2, len(rows), [])


def test_text_that_is_not_of_our_log_is_bad_wherever_a_turn_of_json_stands_before_it() -> None:
    got = result(["2026-11-29 23:35:48,652 INFO kvreturn listening", named("a", 0, 10), "hello", named("a", 1, 20)])
    assert (got["turns"], got["other_lines"], got["bad_lines"]) == (2, 1, 1)


def test_a_log_of_another_program_with_requests_in_it_is_read() -> None:
    line = {"level": "info", "logger": "gateway", "message": "asked", **named("c", 0, 7)}
    assert turn(line).sizes.prompt == 7


ENVOY = (
    '[2026-01-01T12:00:00.000Z] "POST /v1/chat/completions?x=1 HTTP/2" 200 - {more}4000 226 100 90 "10.0.35.28" '
    '"agent/1" "cc21d9b0" "models" "tcp://10.0.2.1:80"'
)
JSON_ACCESS = {
    "start_time": "2026-01-01T12:00:00.000Z",
    "method": "POST",
    "path": "/v1/chat/completions",
    "response_code": 200,
    "bytes_received": 4_000,
    "x_forwarded_for": None,
    "downstream_remote_address": "10.0.35.28:5123",
    "user_agent": "agent/1",
}


@pytest.mark.parametrize(
    "row",
    [ENVOY.format(more=""), ENVOY.format(more='via_upstream - "-" '), JSON_ACCESS],
    ids=["envoy", "istio", "json"],
)
def test_an_access_log_gives_tokens_by_bytes_and_the_client_for_a_conversation(row: Any) -> None:  # noqa: ANN401 - JSON
    found = turn(row)
    assert (found.ts, found.sizes.prompt, found.sizes.estimated) == (NOON, 1_000, True)
    assert found.session is None
    assert found.client == turn(JSON_ACCESS).client


@pytest.mark.parametrize(
    "change", [{"method": "GET"}, {"path": "/health"}, {"response_code": 503}, {"path": None}, {"response_code": "-"}]
)
def test_requests_that_are_no_turns_are_left_out_without_complaint(change: dict[str, Any]) -> None:
    assert read(JSON_ACCESS | change) is None


def test_an_access_log_that_names_the_conversation_is_believed() -> None:
    found = turn(JSON_ACCESS | {"session_id": "s"})
    assert (found.session, found.client) == (turn(named("s", 1, 7)).session, None)
    assert turn(JSON_ACCESS | {"session_id": "s", "prompt_tokens": 7}).sizes.prompt == 7


# --- request logs ---


@pytest.mark.parametrize(
    "wrap",
    [
        lambda body: body | {"ts": 1},
        lambda body: {"ts": 1, "request": body},
        lambda body: {"ts": 1, "request_body": json.dumps(body)},
        lambda body: {"ts": 1, "request": {"method": "POST", "body": body}},
    ],
    ids=["plain", "request", "text", "http"],
)
def test_a_request_is_found_where_loggers_put_it(wrap: Any) -> None:  # noqa: ANN401 - a function
    found = turn(wrap({"model": "m", "messages": [{"role": "user", "content": "x" * 400}]}))
    assert len(found.digests) == 1
    # "user xx..." is 400 bytes and 5 more.
    assert (found.sizes.prompt, found.sizes.estimated) == (101, True)


def test_a_conversation_that_the_log_names_is_believed_before_messages() -> None:
    row = named("c", 1, 7, messages=[{"role": "user", "content": "hi"}])
    assert turn(row).session == turn(named("c", 1, 7)).session
    del row["prompt_tokens"]
    assert turn(row).session is None


def test_a_logged_response_tells_the_tokens_and_the_answer() -> None:
    found = turn(logged(1, [{"role": "user", "content": "hi"}], 9, {"role": "assistant", "content": "ho"}))
    assert (found.sizes.prompt, found.sizes.completion, found.sizes.estimated) == (9, 50, False)
    assert found.answered


# --- files ---


def test_files_are_read_in_order_with_line_numbers_that_count_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbfone\r\n\n  \ntwo")
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(b"three\n")
    names = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")]
    told: list[int] = []
    found = list(read_lines(names, told.append))
    assert [(Path(x.source).name, x.number, x.text) for x in found] == [
        ("a.jsonl", 1, b"one"),
        ("a.jsonl", 4, b"two"),
        ("b.jsonl.gz", 1, b"three"),
    ]
    assert sum(told) == total_size(names)


@given(st.lists(st.binary().map(lambda b: b.replace(b"\n", b"").replace(b"\r", b""))))
def test_every_line_that_is_not_blank_comes_once(texts: list[bytes]) -> None:
    raw = io.BytesIO(b"\n".join(texts))
    found = [line.text for line in lines_module._lines("x", raw, raw, lambda _: None)]
    expected = [t.strip() for t in texts]
    if expected:
        expected[0] = texts[0].removeprefix(b"\xef\xbb\xbf").strip()
    assert found == [t for t in expected if t]


def test_a_line_longer_than_any_request_is_skipped_without_being_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "_MAX_LINE", 10)
    (tmp_path / "log").write_bytes(b"x" * 35 + b"\nshort\n" + b"y" * 10 + b"\n")
    found = list(read_lines([str(tmp_path / "log")], lambda _: None))
    assert [(line.number, line.text) for line in found] == [(1, None), (2, b"short"), (3, None)]


def test_standard_input_is_a_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(b"one\n")

    monkeypatch.setattr("sys.stdin", Stdin())
    assert [line.text for line in read_lines(["-"], lambda _: None)] == [b"one"]
    assert total_size(["-"]) is None


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"one\n" * 1000)[:-9], gzip.compress(b"x")[:12] + b"~~~~~~"],
    ids=["none", "cut off", "broken inside"],
)
def test_broken_gzip_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log.gz").write_bytes(content)
    with pytest.raises(InputError, match=r"log\.gz: broken gzip data"):
        list(read_lines([str(tmp_path / "log.gz")], lambda _: None))


def test_a_file_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(InputError, match=r"/nowhere: No such file"):
        list(read_lines(["/nowhere"], lambda _: None))
