import json

import pytest

from kvreturn.sim.grammar import Manner, Tool, speak
from kvreturn.sim.model import compute, initial_state
from kvreturn.sim.output import Transcript
from kvreturn.sim.tokenizer import EOS, Special, decode, encode

TOOLS = (
    Tool("read_file", {"path": {"type": "string"}, "lines": {"type": "integer"}, "mode": {"enum": ["r", "rb"]}}),
    Tool("run", {"argv": {"type": "array", "items": {"type": "string"}}, "dry": {"type": "boolean"}}),
    Tool("noop", {}),
)


def answer(seed: int, manner: Manner, choice: int = 0) -> list[int]:
    """An answer up to the end token, as the engine would drive it."""
    state, _ = compute(initial_state(""), [seed])
    speech = speak(state, manner, choice)
    token, out = next(speech), []
    while token != EOS:
        out.append(token)
        state, _ = compute(state, [token])
        token = speech.send(state)
    return out


def segments(tokens: list[int]) -> list[list[int]]:
    """Runs of ordinary tokens between special ones."""
    out: list[list[int]] = [[]]
    for token in tokens:
        if token in set(Special):
            out.append([])
        else:
            out[-1].append(token)
    return out


@pytest.mark.parametrize("manner", [Manner(), Manner(thinks=True, tools=TOOLS), Manner(tools=TOOLS, must_call=True)])
def test_exact_answers_encode_back_to_their_tokens(manner: Manner) -> None:
    for seed in range(300):
        for part in segments(answer(seed, manner)):
            assert encode(decode(part)) == part


def test_blurry_answers_often_do_not() -> None:
    parts = [part for seed in range(100) for part in segments(answer(seed, Manner("blurry")))]
    blurred = [part for part in parts if encode(decode(part)) != part]
    assert len(parts) * 0.5 < len(blurred) < len(parts)


def test_both_kinds_say_the_same_kind_of_text() -> None:
    text = decode(answer(7, Manner("blurry")))
    assert text[0].isupper()
    assert text.endswith(".")


def test_tool_calls_are_json_of_the_schema() -> None:
    seen = set()
    for seed in range(200):
        transcript = Transcript(tools=True)
        for token in answer(seed, Manner(tools=TOOLS, must_call=True)):
            transcript.listen(token, False, False)  # noqa: FBT003
        assert 1 <= len(transcript.calls) <= 2
        for call in transcript.calls:
            seen.add(call.name)
            arguments = json.loads(call.arguments)
            if call.name == "read_file":
                assert isinstance(arguments["path"], str)
                assert type(arguments["lines"]) is int
                assert arguments["mode"] in ("r", "rb")
            elif call.name == "run":
                assert all(isinstance(word, str) for word in arguments["argv"])
                assert type(arguments["dry"]) is bool
            else:
                assert arguments == {}
    assert seen == {"read_file", "run", "noop"}


def test_without_tools_there_are_no_calls_and_without_parallel_just_one() -> None:
    assert all(Special.TOOL_CALL not in answer(seed, Manner()) for seed in range(50))
    single = Manner(tools=TOOLS, must_call=True, parallel=False)
    assert all(answer(seed, single).count(Special.TOOL_CALL) == 1 for seed in range(50))


def test_a_thinking_answer_starts_with_its_thinking_part() -> None:
    for seed in range(20):
        tokens = answer(seed, Manner(thinks=True))
        assert tokens[0] == Special.THINK
        assert tokens.count(Special.END_THINK) == 1


def test_answers_depend_on_the_state_and_on_the_choice() -> None:
    assert answer(1, Manner()) == answer(1, Manner())
    assert answer(1, Manner()) != answer(2, Manner())
    assert len({tuple(answer(1, Manner(), choice)) for choice in range(8)}) == 8


def test_it_goes_on_where_the_end_is_refused() -> None:
    state, _ = compute(initial_state(""), [1])
    speech = speak(state, Manner(), 0)
    token, out, refused = next(speech), [], 0
    while refused < 5:
        if token == EOS:
            refused += 1
        else:
            out.append(token)
            state, _ = compute(state, [token])
        token = speech.send(state)
    assert decode(out).startswith(decode(answer(1, Manner())))
    assert len(out) > len(answer(1, Manner()))
