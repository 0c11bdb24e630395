"""bench/scale: the published figures, the simulator, and by hand."""

import gzip
import json
import random
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from closed_loop.scenarios import SCENARIOS, Phase
from kvreturn.sim import Timing
from kvreturn.upstream.pool import Pool
from scale import plots, published, simulated, tables
from scale.figures import Tally, percentiles
from scale.loop import Loop, Steps
from scale.memory import Memory
from scale.nodes import Node
from scale.rates import LONG, SHORT, Rates, fitted
from scale.router import WAYS, Way, choose_node
from scale.serving import Deployment, Serving
from scale.sweeps import Sweep, serve, sweeps
from scale.traces import mooncake, recorded
from scale.workload import Arrivals, Turn, habits

_, ONE_WAY, LAZY, EAGER, AUTO = WAYS
WITHIN = 0.15  # of what was published
EXACT = Timing(prefill_rate=1_000.0, decode_rate=10.0, transfer_rate=1e6, bytes_per_token=100, overhead=0.5)
RATES = Rates(EXACT, replace(EXACT, overhead=0.25), front=0.125, room=1_600)


@pytest.mark.parametrize("row", published.compare(), ids=lambda row: f"{row.prefix}-{row.way}")
def test_the_model_reproduces_what_was_published(row: published.Comparison) -> None:
    assert abs(row.error) <= WITHIN


@pytest.mark.parametrize(
    ("prefix", "read_back", "seconds"),
    [(2_000, False, 0.158), (2_000, True, 0.122), (24_000, False, 0.778), (24_000, True, 0.460)],
)
def test_the_simulator_with_the_same_rates_does_too(prefix: int, read_back: bool, seconds: float) -> None:  # noqa: FBT001
    found = simulated.published(prefix, fitted(), read_back=read_back)
    assert found == pytest.approx(seconds, rel=WITHIN)


@pytest.mark.parametrize("prefix", [SHORT.prefix, LONG.prefix])
def test_eager_beats_lazy(prefix: int) -> None:
    rates = fitted()
    eager = published.ttft(EAGER, prefix, rates, caching=True)
    assert eager < published.ttft(LAZY, prefix, rates, caching=True)
    assert eager < 0.85 * published.ttft(LAZY, prefix, rates)  # P has lost its cache, as in the publication


def test_the_model_agrees_with_the_simulator() -> None:
    scenario = replace(SCENARIOS["C"], phases=(Phase("all", 0.0, 6),))
    rows = {(row.way, row.figure): row for row in simulated.agents(scenario, 45.0)}
    for way in ("one-way", "lazy", "eager", "auto"):
        for figure in ("ttft_p90", "ttft_mean", "computed"):  # the median falls between first turns and later ones
            row = rows[way, figure]
            assert row.modelled == pytest.approx(row.simulated, rel=0.1), row
        read = rows[way, "read"]  # the simulator's last returns arrive after the end
        assert read.modelled == pytest.approx(read.simulated, rel=0.02 if way == "lazy" else 0.25)
        assert rows[way, "pinned"].modelled == pytest.approx(rows[way, "pinned"].simulated, abs=0.03)


@pytest.mark.parametrize(
    ("way", "later", "computed", "read", "returned"),
    [
        # P leg: 0.125 + 0.5 + computed/1000; D leg: what D has not / 10,000 + 0.25 + 0.001.
        # 800 tokens, 100 back: 899 on D, of them 896 in full blocks, as P has 800. The next prompt has 1,000.
        (ONE_WAY, 0.125 + 0.7 + 0.0104 + 0.251, 200, 0, 0),
        # P reads 99 tokens, and computes 101.
        (LAZY, 0.125 + 0.0099 + 0.601 + 0.0104 + 0.251, 101, 99, 0),
        # P has 896 in full blocks.
        (EAGER, 0.125 + 0.604 + 0.0104 + 0.251, 104, 0, 99),
    ],
)
def test_a_conversation_by_hand(way: Way, later: float, computed: int, read: int, returned: int) -> None:
    tally = Tally(0.0, 1e9)
    serving = Serving(Deployment(RATES, budget=0.9), way, tally)
    serving.run([(0.0, [Turn(800, 100, 0.0, "stop"), Turn(100, 1, 5.0, "stop")])], 60.0)
    assert list(tally.first) == [pytest.approx(0.125 + 0.5 + 0.8 + 0.08 + 0.25 + 0.001)]
    assert list(tally.later) == [pytest.approx(later)]
    assert tally.computed == 800 + computed
    assert (tally.read, tally.returned, tally.moved) == (read, returned, 800 + 104)


def test_what_d_keeps_too_short_is_computed_again() -> None:
    turns = [Turn(800, 100, 0.0, "stop"), Turn(100, 1, 50.0, "stop")]
    outcomes = []
    for ttl in (40.0, 80.0):
        tally = Tally(0.0, 1e9)
        Serving(Deployment(RATES, ttl=ttl, budget=0.9), LAZY, tally).run([(0.0, turns)], 100.0)
        outcomes.append(dict(tally.outcomes))
    assert outcomes == [{"first_turn": 1, "expired": 1}, {"first_turn": 1, "hit": 1}]


def test_memory_evicts_the_oldest_conversation_from_its_end_and_lets_wait_in_order() -> None:
    loop, order = Loop(), []

    def use(memory: Memory, conversation: int, tokens: int, seconds: float) -> Steps:
        local = yield from memory.admit(conversation, tokens, tokens)
        order.append((conversation, local, loop.now))
        yield seconds
        memory.release(conversation, tokens)

    memory = Memory(loop, 160)
    for delay, conversation, tokens in [(0.0, 1, 64), (1.0, 2, 64), (4.0, 3, 64), (8.0, 1, 65), (12.0, 2, 65)]:
        loop.spawn(use(memory, conversation, tokens, 2.0), delay)
    loop.spawn(use(memory, 4, 150, 1.0), 12.5)
    loop.spawn(use(memory, 5, 16, 1.0), 12.6)  # would fit, but is behind
    loop.run(100.0)
    # 3 pushes out half of 1, the oldest: 32 of its 64 tokens stay. 1 (65 tokens) then pushes out 33 of 2.
    assert order == [(1, 0, 0.0), (2, 0, 1.0), (3, 0, 4.0), (1, 32, 8.0), (2, 31, 12.0), (4, 0, 14.0), (5, 0, 15.0)]


def test_a_wait_ends_with_what_comes_first() -> None:
    loop, seen = Loop(), []

    def waits() -> Steps:
        me = loop.current
        loop.spawn(wakes(me), 1.0)
        seen.append(((yield from loop.wait(3.0)), loop.now))
        seen.append(((yield from loop.wait(3.0)), loop.now))

    def wakes(process: object) -> Steps:
        loop.wake(process, "news")  # type: ignore[arg-type]
        yield 0.0

    loop.spawn(waits())
    loop.run(100.0)
    assert seen == [("news", 1.0), (None, 4.0)]


def test_nodes_are_chosen_as_the_product_chooses_them() -> None:
    rng, loop = random.Random(1), Loop()
    names = [f"p{i}:1" for i in range(5)]
    nodes = [Node(loop, name, EXACT, Memory(loop, 16)) for name in names]
    pool, order = Pool(names, lambda: 0.0), iter(range(1, 10_000))
    for _ in range(500):
        prefer, slack, tokens = rng.choice([None, *nodes]), rng.choice([0, 5, 50]), rng.randint(1, 30)
        ours = choose_node(nodes, prefer, slack, order)  # type: ignore[arg-type]
        assert ours.name == pool.choose(prefer.name if prefer else None, slack=slack)
        ours.load += tokens
        pool.started(ours.name, tokens)
        over = rng.choice(nodes)
        pool.finished(over.name, over.load)
        over.load = 0


def test_the_same_seed_gives_the_same_figures_and_pages(tmp_path: Path) -> None:
    sweep = sweeps(size=0.05)["cache"]
    sweep = Sweep(sweep.title, sweep.axis, sweep.points[:2])
    runs = {way.name: [serve(point, way) for point in sweep.points] for way in WAYS}
    assert [serve(point, AUTO) for point in sweep.points] == runs["auto"]
    assert runs["auto"][0].turns > 100
    assert runs["lazy"][0].computed < 0.8 * runs["one-way"][0].computed
    assert len(tables.of_sweep(sweep, runs)) == 2 + 2 * len(WAYS)
    panels, logarithmic = plots.PANELS["cache"]
    plots.draw(sweep, runs, panels, tmp_path / "cache.png", logarithmic=logarithmic)
    assert (tmp_path / "cache.png").read_bytes().startswith(b"\x89PNG")


def test_conversations_have_an_end_and_tools_are_called_before_it() -> None:
    for kind in ("agent", "chat"):
        conversations = [turns for _, turns in Arrivals(habits(kind), 200, 1.0, seed=3)]
        assert all(turns[-1].finish == "stop" or len(turns) > 1 for turns in conversations)
        assert any(turn.finish == "tool_calls" for turns in conversations for turn in turns) is (kind == "agent")


def test_a_trace_is_taken_apart_into_conversations(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1_100, "output_length": 80, "hash_ids": [0, 1, 2]},
        {"timestamp": 4_000, "input_length": 1_300, "output_length": 10, "hash_ids": [0, 7, 8]},
        {"timestamp": 11_000, "input_length": 1_600, "output_length": 20, "hash_ids": [0, 1, 3, 4]},
        {"timestamp": 30_000, "input_length": 1_700, "output_length": 20, "hash_ids": [0, 1, 3, 5]},  # forks after 3
    ]
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    requests = mooncake(path)
    assert [request.before for request in requests] == [None, None, 0, 2]
    [(first, turns), (second, alone)] = recorded(requests).conversations
    assert (first, second, len(alone)) == (0.0, 4.0, 1)
    assert [(turn.new, turn.gap) for turn in turns] == [(1_100, 0.0), (420, 10.0), (80, 18.75)]


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentiles(array("d", range(200))) == {50: 100.0, 90: 180.0, 99: 198.0}
    assert percentiles(array("d")) == {}
