"""Conversations from files."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvreturn.bench.conversation import Ask, Conversation
from kvreturn.bench.replay import LARGEST, ReplayError, read
from support import corpus


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


HISTORY = [
    {"role": "system", "content": "Be brief."},
    user("One?"),
    model("1" * 40),
    user("Two?"),
    model("2" * 80),
    {"role": "tool", "content": "Three"},
]
PLAYED = Conversation("", "Be brief.", [Ask("One?", 0, 10), Ask("Two?", 0, 20, 2.0), Ask("Three", 0, 20, 2.0)])
SHARE_GPT = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1" * 40}]


def played(tmp_path: Path, text: str, output_tokens: int | None = None, gap: float | None = None) -> list[Conversation]:
    path = tmp_path / "file"
    path.write_text(text)
    return read(path, output_tokens, gap)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(HISTORY),
        json.dumps({"messages": HISTORY}),
        json.dumps([{"messages": HISTORY}]),
        json.dumps({"messages": HISTORY}) + "\n\n",
        json.dumps({"ts": 1, "request": {"messages": HISTORY}}),
    ],
)
def test_a_history_is_played_with_answers_as_long_as_recorded(tmp_path: Path, text: str) -> None:
    assert played(tmp_path, text, gap=2.0) == [PLAYED]


def test_histories_of_sharegpt_and_ids_of_vllms_benchmark(tmp_path: Path) -> None:
    text = json.dumps([{"id": "a", "conversations": SHARE_GPT}, {"id": "b", "messages": HISTORY}])
    assert played(tmp_path, text, output_tokens=7) == [
        Conversation("a", "", [Ask("One?", 0, 7)]),
        Conversation("b", "Be brief.", [Ask("One?", 0, 7), Ask("Two?", 0, 7), Ask("Three", 0, 7)]),
    ]


def test_of_a_log_of_requests_only_the_last_of_each_conversation_is_played(tmp_path: Path) -> None:
    rows = [HISTORY[:2], [user("Other")], HISTORY[:4], HISTORY]
    text = "\n".join(json.dumps({"messages": row}) for row in rows)
    assert [[a.text for a in c.asks] for c in played(tmp_path, text)] == [["Other"], ["One?", "Two?", "Three"]]


def test_messages_in_parts_and_several_between_two_answers_are_one_question(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "On"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "e"}]
    history = [{"role": "user", "content": parts}, user("Two"), model(""), {"role": "tool", "content": None}]
    assert [a.text for a in played(tmp_path, json.dumps(history))[0].asks] == ["One\n\nTwo", "Go on."]


def test_a_log_of_lengths_is_played_as_long_and_as_far_apart(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"conversation_id": 1, "ts": 103, "prompt_tokens": 160, "completion_tokens": 9},
        {"conversation_id": 1, "ts": 100, "prompt_tokens": 100, "completion_tokens": 20},
        {"session_id": "x", "ts": 100, "input_tokens": 50},
        {"conversation_id": 1, "ts": 999, "prompt_tokens": 80, "completion_tokens": 5},
    ]
    text = "\n".join(map(json.dumps, rows))
    # The second turn brings 160 - (100 + 20). The third one shrank, after 896 s: the least tokens, the longest gap.
    long = [Ask(None, 100, 20), Ask(None, 40, 9, 3.0), Ask(None, 1, 5, 60.0)]
    assert played(tmp_path, text) == [Conversation("1", "", long), Conversation("x", "", [Ask(None, 50, 64)])]
    assert [a.gap for a in played(tmp_path, text, gap=0.5)[0].asks] == [0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "empty"),
        ("\n \n", "empty"),
        ('{"messages": [', "file:1: not JSON"),
        ('{"messages": []}\n', "no history: give a list of messages"),
        ('{"messages": 3}', "no history: give a list of messages"),
        ('[{"messages": [{"content": "x"}]}]', "item 0: a message without `role`"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no history in it has a message of a user"),
        ('{"prompt_tokens": 3, "ts": 1}\n', "neither a history nor a turn"),
        ('{"conversation_id": 1, "prompt_tokens": 3}\n', "no time"),
        ('{"conversation_id": 1, "ts": 1, "prompt_tokens": -3}\n', "not a number of tokens"),
        ("3", "no history: give a list of messages"),
        ("[" * 100_000, "file:1: not JSON: nested too deeply"),
    ],
)
def test_what_cannot_be_played_is_named_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ReplayError) as error:
        played(tmp_path, text)
    assert str(tmp_path / "file") in str(error.value)
    assert told in str(error.value)


def test_a_file_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)  # a hole: takes no room
    with pytest.raises(ReplayError, match="larger than 128 MB"):
        read(path, None, None)


@pytest.mark.parametrize("path", corpus.files("data/agents/*.json"))
def test_recorded_histories_can_be_played(path: Path) -> None:
    (conversation,) = read(path, None, None)
    messages = json.loads(path.read_text())["messages"]
    answers = sum(m["role"] == "assistant" for m in messages)
    assert len(conversation.asks) in {answers, answers + 1}
