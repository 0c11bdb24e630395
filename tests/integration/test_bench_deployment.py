"""`kvreturn bench` on a deployment that is there: real Envoy and router, nodes that take no time."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvreturn.bench.conversation import Replayed, Synthetic
from kvreturn.bench.deployment import Manner, on_deployment, targets
from kvreturn.bench.drive import Load
from kvreturn.bench.replay import read
from kvreturn.bench.run import Plan, Run, bench
from kvreturn.bench.spread import Spread
from kvreturn.bench.summary import Summary, summarize
from kvreturn.demo.stack import Front
from support.demo import nodes

pytestmark = pytest.mark.asyncio(loop_scope="module")
TURNS = 4
_TURNS, _FIRST, _MORE, _ANSWER, _GAP = map(Spread.parse, (str(TURNS), "200", "uniform:90:110", "8", "0"))
SHORT = Synthetic(_TURNS, _FIRST, _MORE, _ANSWER, _GAP)


@dataclass
class Deployment:
    """A front with a model that reads back and one that does not."""

    front: Front

    async def play(
        self,
        source: Synthetic | Replayed = SHORT,
        manner: Manner = Manner(),  # noqa: B008 - frozen
        *,
        models: tuple[str, str] = ("demo-off", "demo-lazy"),
        run: Run | None = None,
        told: Callable[[], None] = lambda: None,
        **plan: Any,  # noqa: ANN401 - members of `Plan`
    ) -> Summary:
        front, run = self.front, run or Run()
        to = targets([front.gateway] * 2, models, [f"{front.prefill}/metrics"], [[front.router_metrics]] * 2)
        members = {"conversations": 1, "rounds": 1, "load": Load(), **plan}
        async with aiohttp.ClientSession() as session, on_deployment(to, manner, session) as ground:
            await ground.play(bench(ground.legs, Plan(source, **members), session, lambda *_: told(), run))
        return summarize(run, {}, simulated=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    async with nodes() as there:
        yield Deployment(there.stack.fronts["lazy"])


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages"])
async def test_any_api_is_played(deployment: Deployment, api: str) -> None:
    legs = (await deployment.play(manner=Manner(api))).legs
    assert legs["off"].look.turns == {"disabled": TURNS}
    assert legs["on"].look.turns.pop("first_turn") == 1
    assert set(legs["on"].look.turns) <= {"hit", "partial_hit", "slower"}
    assert (legs["off"].requests, legs["on"].requests) == (TURNS, TURNS)
    assert (legs["off"].failures, legs["on"].failures) == (0, 0)


async def test_histories_are_replayed_in_an_open_loop(deployment: Deployment, tmp_path: Path) -> None:
    history = [{"role": "user", "content": "file path " * 100}, {"role": "assistant", "content": "x" * 40}] * 3
    path = tmp_path / "histories.jsonl"
    path.write_text("".join(json.dumps({"id": f"h{n}", "messages": history}) + "\n" for n in range(2)))
    manner = Manner(stream=False, headers={"x-tenant": "a"})
    summary = await deployment.play(
        Replayed(read(path, None, 0.0)), manner, load=Load(rate=100), rounds=2, conversations=3
    )
    legs = summary.legs
    assert legs["off"].requests == legs["on"].requests == 2 * 3 * 3
    assert legs["off"].tables["output_num_tokens"]["50%"] == 10
    assert any("time to the whole answer" in d.text for d in summary.doubts)
    assert not any("others use them" in d.text or "metrics of all of them" in d.text for d in summary.doubts)


async def test_legs_that_reuse_nothing_or_both_something_mean_nothing(deployment: Deployment) -> None:
    summary = await deployment.play(models=("demo-lazy", "demo-off"))
    assert summary.verdict.startswith("Nothing to compare: Nothing was reused in the leg `on`")
    texts = [d.text for d in summary.doubts if d.level == "void"]
    assert any(text.startswith("The leg `off` is not off") for text in texts)


async def test_what_was_counted_until_it_was_stopped_is_in_the_report(deployment: Deployment) -> None:
    run, begun = Run(), asyncio.Event()
    source = Synthetic(Spread.parse("50"), _MORE, Spread.parse("1"), _ANSWER, _GAP)
    playing = asyncio.create_task(deployment.play(source, run=run, told=begun.set))
    await begun.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    (played,) = run.played
    assert played.samples
    assert played.look
    assert played.look.caching is False
    assert set(played.look.turns) <= {"disabled", "cancelled"}
