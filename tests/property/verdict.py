"""What a client was told: read, compared with what the oracle says, and counted."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from property.client import Answer
from property.wording import Json

# Node addresses and handles, as nodes and router write them.
_SECRETS = (b'transfer_params"', b"remote_engine_id", b"remote_host", b'"kvreturn"', b"digests")
_OWN = frozenset({"id", "created", "system_fingerprint", "kv_transfer_params", "ec_transfer_params"})


class WrongAnswerError(AssertionError):
    """A client got another answer than it should."""


class PoisonedCacheError(AssertionError):
    """A prefix cache holds something else than what belongs to its tokens: a wrong answer to come."""


@dataclass(frozen=True)
class Told:
    """A response.

    Attributes:
        status: of it.
        body: of it.
        stream: whether it was asked for as a stream.
        whole: whether the connection lasted to its end.
    """

    status: int
    body: bytes
    stream: bool
    whole: bool = True

    @property
    def objects(self) -> list[Json]:
        """The JSON objects in it."""
        if not self.stream:
            return [json.loads(self.body)]
        events = self.body.decode().split("\n\n")[:-1]
        return [json.loads(event.removeprefix("data: ")) for event in events if event != "data: [DONE]"]

    @property
    def complete(self) -> bool:
        """Whether it is an answer, to the end."""
        if self.status != 200 or not self.whole:
            return False
        if self.stream and not self.body.endswith(b"\n\ndata: [DONE]\n\n"):
            return False
        try:
            return not any("error" in o for o in self.objects)
        except ValueError:  # a node's fault that was ordered
            return False

    def answer(self, choice: int) -> Answer:
        """What a client makes of a complete one."""
        if not self.stream:
            (of,) = [c for c in self.objects[0]["choices"] if c["index"] == choice]
            if "message" in of:
                return Answer(of["message"]["content"] or "", of["message"])
            return Answer(of["text"], ids=of["token_ids"] or ())
        pieces = [c for o in self.objects for c in o["choices"] if c["index"] == choice]
        if "text" in pieces[0]:
            return Answer("".join(p["text"] for p in pieces), ids=[t for p in pieces for t in p["token_ids"] or ()])
        message: Json = {"role": "assistant", "content": "", "reasoning": ""}
        calls: dict[int, Json] = {}
        for piece in pieces:
            delta = piece["delta"]
            for name in ("content", "reasoning"):
                message[name] += delta.get(name) or ""
            for part in delta.get("tool_calls") or ():
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part["index"], empty)
                call["id"] = part.get("id") or call["id"]
                for name, text in part["function"].items():
                    call["function"][name] += text
        message = {name: text for name, text in message.items() if text} | {"role": "assistant"}
        if calls:
            message["tool_calls"] = [calls[i] for i in sorted(calls)]
        return Answer(message.get("content", ""), message)

    def comparable(self) -> Any:  # noqa: ANN401 - JSON
        """All that two right answers have in common: by choice, chunk by chunk, and the usage at the end.

        Left out is what each node draws for itself (ids, times) and what tells of its caches.
        """
        choices: defaultdict[int, list[Json]] = defaultdict(list)
        usage: list[Json] = []
        for obj in self.objects:
            rest = {k: v for k, v in obj.items() if k not in _OWN and k not in {"choices", "usage"}}
            for choice in obj["choices"]:
                choices[choice["index"]].append(_without_ids(choice) | rest)
            if obj.get("usage"):
                usage.append({k: v for k, v in obj["usage"].items() if k != "prompt_tokens_details"})
        return dict(choices), usage if len(choices) == 1 else usage[-1:]


def _without_ids(choice: Json) -> Json:
    """A choice without the random ids of tool calls."""
    part = "delta" if "delta" in choice else "message"
    calls = (choice.get(part) or {}).get("tool_calls")
    if not calls:
        return choice
    bare = [{k: v for k, v in call.items() if k != "id"} for call in calls]
    return {**choice, part: {**choice[part], "tool_calls": bare}}


def compare(got: Told, expected: Told) -> None:
    """Check a complete answer.

    Raises:
        WrongAnswerError: it is not the expected one.
    """
    if not expected.complete or got.comparable() != expected.comparable():
        raise WrongAnswerError(f"wrong answer\n got      {got.body!r}\n expected {expected.body!r}")


def check_secrets(told: Told) -> None:
    """Nothing of handles reaches a client."""
    found = [secret for secret in _SECRETS if secret in told.body]
    assert not found, f"the client sees {found}: {told.body!r}"


@dataclass
class Tally:
    """Counts over all histories.

    Attributes:
        outcomes: turns by what became of reuse, as the router says.
        fates: turns by how they ended for their client, and what was held up.
        returns: eager returns by what became of them, as the router says.
        read_tokens: tokens that prefill nodes read back.
    """

    histories: int = 0
    turns: int = 0
    compared: int = 0
    read_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    returns: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        outcomes, fates, returns = map(_listed, (self.outcomes, self.fates, self.returns))
        return (
            f"{self.histories} histories, {self.turns} turns ({fates}), {self.compared} answers compared, "
            f"{self.read_tokens} tokens read back\n  {outcomes}\n  returns: {returns}"
        )


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"
