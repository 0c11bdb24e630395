"""JSON Lines, and the trace that a line belongs to."""

import json
import logging
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from kvreturn.cli import up
from kvreturn.telemetry.logs import JSONFormatter
from kvreturn.telemetry.tracing import Tracing
from support.extproc import Request, Response
from support.harness import DECODE, harness
from support.nodes import chat, decode_events, handle

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def formatted(record: logging.LogRecord) -> dict[str, Any]:
    text = JSONFormatter().format(record)
    assert "\n" not in text
    line: dict[str, Any] = json.loads(text)
    return line


def record(message: str, **more: Any) -> logging.LogRecord:  # noqa: ANN401 - a record's attributes
    made = logging.LogRecord("kvreturn", logging.WARNING, "", 0, message, None, None)
    made.created = 1767268800.25
    made.__dict__.update(more)
    return made


def test_text_becomes_a_message() -> None:
    assert formatted(record('two\nlines, and "quotes" \u2028')) == {
        "ts": "2026-01-01T12:00:00.250+00:00",
        "level": "warning",
        "logger": "kvreturn",
        "message": 'two\nlines, and "quotes" \u2028',
    }


def test_a_worker_is_named() -> None:
    assert json.loads(JSONFormatter(1).format(record("x")))["worker"] == 1


def test_fields_take_the_place_of_the_text_and_unknown_ones_are_left_out() -> None:
    line = formatted(record("text", fields={"outcome": "hit", "read": None, "captured": True, "prefill_ms": 1.5}))
    assert {k: line[k] for k in line.keys() - {"ts", "level", "logger"}} == {
        "outcome": "hit",
        "captured": True,
        "prefill_ms": 1.5,
    }


def test_an_exception_stays_in_its_line() -> None:
    with pytest.raises(ValueError, match="x") as raised:
        int("x\ny")
    line = formatted(record("it failed", exc_info=(ValueError, raised.value, raised.tb)))
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("'x\\ny'")


@pytest.mark.parametrize("tracing", [Tracing(), Tracing(TracerProvider(shutdown_on_exit=False))], ids=["off", "on"])
async def test_a_turns_line_names_its_trace(tracing: Tracing, caplog: pytest.LogCaptureFixture) -> None:
    """Without tracing of our own it is the caller's span, which is where the reader has to look."""
    caplog.set_level(logging.INFO, "kvreturn.turn")
    router = harness()
    router.world.tracing = tracing
    headers = {"content-type": "application/json", "traceparent": CALLER}
    await router.play(Request(pieces=[chat("secret words")], headers=headers), Response(decode_events(), node=DECODE))
    (turn,) = [r for r in caplog.records if r.name == "kvreturn.turn"]
    line = formatted(turn)
    assert line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert (line["span_id"] == "b7ad6b7169203331") is not tracing.on
    assert f"trace_id={line['trace_id']} span_id={line['span_id']}" in turn.getMessage()
    assert "secret" not in json.dumps(line)


async def test_without_any_trace_the_line_names_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvreturn.turn")
    router = harness()
    await router.play(Request(pieces=[chat("Hi")]), Response(decode_events(params=handle()), node=DECODE))
    assert "trace_id" not in formatted(next(r for r in caplog.records if r.name == "kvreturn.turn"))


def test_up_makes_json_of_what_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    for source, text in (("router", '{"ts": "now"}'), ("router", "Traceback"), ("envoy", '{"odd": 1}')):
        up._print_json(source, text)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line.get("logger"), line.get("message")) for line in lines] == [
        (None, None),
        ("router", "Traceback"),
        ("envoy", '{"odd": 1}'),
    ]
