"""How conversations are played, against a client that answers at once and keeps the time."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import pytest

from kvreturn.bench.conversation import Ask, Conversation, Replayed, Synthetic, Words
from kvreturn.bench.drive import Drive, Load
from kvreturn.bench.spread import Spread
from kvreturn.bench.talk import Reply, Said, TalkError


@dataclass
class FakeTalk:
    """Answers `ok` after a while; fails where it is told to."""

    seconds: float = 0.0
    fails_at: int = -1
    asked: list[list[Said]] = field(default_factory=list)
    at_once: int = 0
    most: int = 0

    async def ask(self, said: Sequence[Said], max_tokens: int, salt: str) -> Reply:
        del max_tokens, salt
        self.asked.append(list(said))
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(self.seconds)
            if len(self.asked) - 1 == self.fails_at:
                raise TalkError("HTTP 503: no")
        finally:
            self.at_once -= 1
        return Reply("ok", 10 * len(said), 5, 5, 0.1, 0.5)


def drive(talk: FakeTalk) -> Drive:
    double: Any = talk
    return Drive(double, "on", 0, time.perf_counter(), "salt", lambda _: None)


def conversations(count: int, turns: int = 2, gap: float = 0.0) -> list[Conversation]:
    asks = [Ask(f"q{n}", 0, 5, gap if n else 0.0) for n in range(turns)]
    return [Conversation(f"c{n}", "sys", asks) for n in range(count)]


async def test_each_request_holds_the_conversation_with_the_models_own_answers() -> None:
    talk = FakeTalk()
    playing = drive(talk)
    await playing.play(conversations(1), Load(), random.Random(1))
    opening = [("system", "sys"), ("user", "q0")]
    assert talk.asked == [opening, [*opening, ("assistant", "ok"), ("user", "q1")]]
    first, second = playing.samples
    assert (first.ttft_ms, first.latency_ms, first.tpot_ms) == (100, 500, 100)  # 400 ms for 4 tokens behind the first
    assert (first.input_num_turns, second.input_num_turns) == (2, 4)
    assert (first.output_num_chunks, first.output_num_tokens) == (4, 5)
    # The second prompt has 40 tokens; the turn before had 20, and 5 of its answer.
    assert (first.approx_cached_percent, second.approx_cached_percent) == (0.0, 62.5)


async def test_a_closed_loop_holds_as_many_conversations_as_it_has_clients() -> None:
    talk = FakeTalk(seconds=0.01)
    playing = drive(talk)
    await playing.play(conversations(7), Load(clients=3), random.Random(1))
    assert (talk.most, len(playing.samples)) == (3, 14)
    assert {s.client_id for s in playing.samples} == {0, 1, 2}


async def test_an_open_loop_waits_for_nobody() -> None:
    talk = FakeTalk(seconds=0.3)
    begun = time.perf_counter()
    await drive(talk).play(conversations(20, turns=1), Load(rate=400.0), random.Random(1))
    assert talk.most > 10  # 20 conversations begin within about 0.05 s
    assert time.perf_counter() - begun < 20 * 0.3


async def test_gaps_are_kept_between_an_answer_and_the_next_request() -> None:
    talk = FakeTalk()
    playing = drive(talk)
    await playing.play(conversations(1, turns=3, gap=0.05), Load(), random.Random(1))
    times = [s.start_time_ms for s in playing.samples]
    assert [later - earlier >= 49 for earlier, later in pairwise(times)] == [True, True]


async def test_a_failure_ends_its_conversation_and_no_other() -> None:
    playing = drive(FakeTalk(fails_at=2))
    await playing.play(conversations(3, turns=3), Load(), random.Random(1))
    assert [(f.conversation_id, f.turn, f.why) for f in playing.failures] == [("c0", 2, "HTTP 503: no")]
    assert len(playing.samples) == 2 + 3 + 3


@pytest.mark.parametrize("system_tokens", [0, 50])
def test_made_up_conversations_have_the_turns_and_lengths_that_are_asked_for(system_tokens: int) -> None:
    turns, first, more, answer, gap = map(Spread.parse, ("uniform:2:4", "100", "10", "7", "1.5"))
    source = Synthetic(turns, first, more, answer, gap, system_tokens)
    half = Words(0.5)  # half a word a token
    drawn = [half.fill(c) for c in islice(source.conversations(random.Random(1), half), 50)]
    assert {len(c.asks) for c in drawn} == {2, 3, 4}
    for conversation in drawn:
        words = [len((a.text or "").split()) for a in conversation.asks]
        assert words == [50, *[5] * (len(words) - 1)]
        assert [a.gap for a in conversation.asks] == [0.0, *[1.5] * (len(words) - 1)]
        assert {a.max_tokens for a in conversation.asks} == {7}
        assert len(conversation.system.split()) == system_tokens / 2
    assert len({c.system for c in drawn}) == 1


async def test_text_is_made_when_its_conversation_begins_and_is_the_same_in_both_legs() -> None:
    turns, first, more, answer, gap = map(Spread.parse, ("2", "1000", "10", "7", "0"))
    drawn = list(islice(Synthetic(turns, first, more, answer, gap).conversations(random.Random(1), Words()), 3))
    assert {a.text for c in drawn for a in c.asks} == {None}
    off, on = FakeTalk(), FakeTalk()
    for talk in (off, on):
        await drive(talk).play(drawn, Load(), random.Random(1))
    assert off.asked == on.asked
    assert [len(said[-1][1].split()) for said in off.asked] == [1000, 10] * 3
    assert len({said[-1][1] for said in off.asked}) == 6


def test_a_file_is_played_over_again_with_other_text_where_it_has_none() -> None:
    recorded = Conversation("a", "", [Ask("said", 0, 5), Ask(None, 10, 5)])
    words = Words()
    first, second = map(words.fill, islice(Replayed([recorded]).conversations(random.Random(1), words), 2))
    assert first.asks[0].text == second.asks[0].text == "said"
    assert first.asks[1].text != second.asks[1].text
