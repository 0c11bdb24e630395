"""Real histories, turn by turn, against tokens: nothing is read that the prompt does not have, and little is missed.

Expected values are the nodes' own tokens: rendered by chat templates, encoded by a tokenizer, compared one by one.
By default a sample; `make replay` plays all combinations and prints what was missed.
"""

import itertools
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import get_args

import pytest
from tokenizers import Tokenizer

from kvreturn.core.policy import Policy
from replay.clients import CLIENTS, ChatClient, Client, CompletionsClient
from replay.histories import Habit, History, agent, recorded
from replay.nodes import Nodes
from replay.play import Tally, play
from replay.rendering import TEMPLATES, Template, trained
from support import corpus

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the official clients
ALL = os.environ.get("KVRETURN_REPLAY") == "all"
REWRITES: tuple[Habit, ...] = ("reminds", "elides")
"""These change what was said before the latest answer, so that no turn's whole prompt is in the next one, and none is
found. What D shares with the next prompt then ends inside the prompt before, which P has computed itself."""
Table = dict[tuple[str, str, Habit], Tally]


@cache
def tokenizer() -> Tokenizer:
    return trained(p.read_text() for p in corpus.every("data/agents/*.json"))


@cache
def histories(client: type[Client]) -> list[History]:
    agents = corpus.every("data/agents/*.json" if ALL else "data/agents/tools_simple.json")
    found = [agent(path, client, thinks=thinks) for path in agents for thinks in (False, True)]
    if client is not CompletionsClient:  # of these there is one recording, and no history in it
        recordings = corpus.every(f"data/streams/{client.api.name}_*.sse")
        found.append(recorded(recordings if ALL else recordings[::4], client))
    return found


def setups(client: type[Client]) -> Iterator[tuple[Template, bool, bool]]:
    """Template, whether P is a stock one and the router proves, whether generated tokens may be odd ones."""
    levels = (False, True) if client in {ChatClient, CompletionsClient} else (False,)
    yield from itertools.product(TEMPLATES, levels, (False, True))


def cases(client: type[Client]) -> Iterator[tuple[History, Habit, Template, bool, bool]]:
    habits: tuple[Habit, ...] = ("as it came",) if client is CompletionsClient else get_args(Habit)
    rotated = itertools.cycle(setups(client))
    for history, habit in itertools.product(histories(client), habits):
        for setup in setups(client) if ALL else (next(rotated),):
            yield history, habit, *setup


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """What was missed, by API, source and habit; printed in the end."""
    rows: Table = defaultdict(Tally)
    yield rows
    heads = f"{'turns':>7}{'provable':>10}{'missed':>8}{'of tokens':>11}{'dear':>7}"
    print(f"\n{'API':12}{'histories':18}{'client':12}{heads}")
    for (api, source, habit), tally in rows.items():
        counts = f"{tally.turns:7}{tally.provable:10}{tally.missed:8}{tally.share:11.2%}{tally.dear:7}"
        print(f"{api:12}{source:18}{habit:12}{counts}  {dict(tally.outcomes) or ''}")


@pytest.mark.parametrize("client", CLIENTS)
def test_only_what_the_prompt_has_is_read_and_all_that_could_be(client: type[Client], table: Table) -> None:
    for history, habit, template, stock, odd in cases(client):
        nodes = Nodes(template, tokenizer(), stock, random.Random(1) if odd else None)
        tally = play(client(history, habit), nodes, Policy(proof="router" if stock else "connector"))
        table[client.api.name, history.source, habit].add(tally)
        assert tally.dear == 0, f"{history.source}, {habit}, {template.name}: {tally}"
        if habit not in REWRITES:
            assert tally.provable, "the nodes share nothing, so that nothing was shown"
            assert (tally.missed, tally.lost) == (0, 0), f"{history.source}, {habit}, {template.name}: {tally}"


def test_trust_holds_for_text_under_a_template_that_keeps_all_of_it() -> None:
    (path,) = corpus.every("data/agents/humaneval.json")
    client = ChatClient(agent(path, ChatClient, thinks=False), "as it came")
    tally = play(client, Nodes(TEMPLATES[0], tokenizer(), stock=True), Policy(proof="trusted"))
    assert (tally.turns, tally.provable, tally.missed) == (5, 4, 0)
