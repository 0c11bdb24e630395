"""The figures for a production trace, against a computation that shares nothing with the product."""

import gzip
import json
from typing import Any

import pytest
from click.testing import CliRunner

from kvreturn.cli.main import main
from support import corpus

BLOCK = 512
TTL_MS = 480_000


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    with gzip.open(corpus.sample("data/mooncake_conversation_trace.jsonl.gz")) as file:
        return [json.loads(line) for line in file]


def test_a_production_trace_gives_the_figures_that_a_plain_computation_gives(rows: list[dict[str, Any]]) -> None:
    """A turn follows the one with the longest prompt, of two whole blocks or more, that it repeats, if no other has."""
    last: dict[tuple[int, ...], dict[str, Any]] = {}
    pairs = []
    held = 0  # token milliseconds on D
    for row in rows:
        blocks = tuple(row["hash_ids"][: row["input_length"] // BLOCK])
        length = next((n for n in range(len(blocks), 1, -1) if blocks[:n] in last), None)
        if length:
            before = last.pop(blocks[:length])
            pairs.append((before, row, length * BLOCK))
        last[blocks] = row
    followed = {id(before): row["timestamp"] for before, row, _ in pairs}
    for row in rows:
        until = followed.get(id(row), rows[-1]["timestamp"])
        held += (row["input_length"] + row["output_length"]) * min(until - row["timestamp"], TTL_MS)
    on_time = [(before, row, n) for before, row, n in pairs if row["timestamp"] - before["timestamp"] <= TTL_MS]
    reused = sum(min(n + before["output_length"], row["input_length"]) for before, row, n in on_time)
    prompts = sum(row["input_length"] for row in rows)

    ran = CliRunner().invoke(
        main, ["analyze", str(corpus.sample("data/mooncake_conversation_trace.jsonl.gz")), "--json"]
    )
    assert ran.exit_code == 0
    got = json.loads(ran.stdout)
    assert (got["turns"], got["prompt_tokens"], got["bad_lines"]) == (12_031, prompts, 0)
    assert got["follow_up_turns"] == len(pairs)
    assert got["repeated_prompt_share"] == pytest.approx(
        sum(n for _, _, n in pairs) / sum(row["input_length"] for _, row, _ in pairs)
    )
    assert got["late_turn_share"] == pytest.approx(1 - len(on_time) / len(pairs))
    assert got["reuse_share"] == pytest.approx(reused / prompts)
    # 8,000 tokens/s against 131,072 bytes a token at 10 GB/s, and 5 ms per read.
    saved = reused * (1 / 8_000 - 131_072 / 10e9) - 0.005 * len(on_time)
    assert got["prefill_saved_share"] == pytest.approx(saved / (prompts / 8_000))
    span = rows[-1]["timestamp"] - rows[0]["timestamp"]
    assert got["pinned_mean_gb"] == pytest.approx(held / span * 131_072 / 1e9)
    # The peak is exact to a 4096th of the time.
    events = []
    for row in rows:
        until = min(followed.get(id(row), rows[-1]["timestamp"]), row["timestamp"] + TTL_MS)
        tokens = row["input_length"] + row["output_length"]
        events += [(row["timestamp"], tokens), (until, -tokens)]
    now = peak = 0
    for _, step in sorted(events):
        now += step
        peak = max(peak, now)
    assert got["pinned_peak_gb"] == pytest.approx(peak * 131_072 / 1e9, rel=0.01)


def test_the_order_of_lines_does_not_matter(rows: list[dict[str, Any]]) -> None:
    text = [json.dumps(row) for row in rows[:2_000]]
    forward, backward = (
        json.loads(CliRunner().invoke(main, ["analyze", "--json"], input="\n".join(lines)).stdout)
        # Lines of the same moment keep their order, so that only others change places.
        for lines in (text, sorted(text, key=lambda line: -json.loads(line)["timestamp"]))
    )
    assert forward == backward
    assert forward["follow_up_turns"] > 0
