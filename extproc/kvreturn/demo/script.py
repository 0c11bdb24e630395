"""What the agent's user and tools say, whatever the model answers."""

import importlib.resources
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]

_SYSTEM = """\
You are a software engineer who works in the repository of kvreturn, an Envoy external processor for disaggregated vLLM.
Read before you judge, one file at a time. Use read_file for a file, search for a word, and run_tests before you say
that something works. Say in one sentence what you look for before you call a tool. When you know enough, answer the
question and name the files that you read."""
_QUESTION = (
    "How does a handle get from the decode node's stream to the next prefill, and what keeps it from being wrong?"
)
_FOLLOW_UP = "Good. And what of that depends on Envoy's body mode?"
# The tools' results are real files: this package's own.
_FILES = (
    *("core/outcome.py", "core/handle.py", "core/fingerprint.py", "core/scrub.py", "core/prefill.py", "core/sse.py"),
    *("core/attach.py", "server/request.py", "store/memory.py"),
)
_SMALL_FILES = ("core/outcome.py", "core/scrub.py", "core/attach.py", "core/fingerprint.py", "core/sse.py")


class ScriptError(Exception):
    """A conversation file that cannot be played."""


@dataclass(frozen=True, slots=True)
class Script:
    """One conversation.

    Attributes:
        opening: messages before the first answer.
        turns: what follows each answer: text of the user, or of tools if the answer called some.
        tools: OpenAI tool definitions.
        max_tokens: longest answer.
    """

    opening: Sequence[Message]
    turns: Sequence[Sequence[str]]
    tools: Sequence[dict[str, Any]]
    max_tokens: int = 256

    @property
    def length(self) -> int:
        """Number of answers."""
        return len(self.turns) + 1


def built_in(*, small: bool = False) -> Script:
    """An agent that reads this package's source: tool results of a few thousand tokens, growing past 20,000.

    Args:
        small: fewer files and shorter answers, for a tiny model on a CPU: it ends at about 8,000 of its tokens.
    """
    package = importlib.resources.files("kvreturn")
    files = [[package.joinpath(name).read_text()] for name in (_SMALL_FILES if small else _FILES)]
    return Script(
        opening=[{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _QUESTION}],
        turns=[*files[:-1], [_FOLLOW_UP], files[-1]],
        tools=[
            _tool("read_file", "Return the text of a file.", path="Path in the repository."),
            _tool("search", "Find lines that contain a word.", word="What to look for.", folder="Where to look."),
            _tool("run_tests", "Run tests and return their output.", selection="Which tests."),
        ],
        max_tokens=64 if small else 256,
    )


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def from_file(path: Path) -> Script:
    """A chat history: its user and tool messages are played, the model's answers take the place of the assistant's.

    The file holds a list of chat messages, or an object with one under `messages` and perhaps tools under `tools`.

    Raises:
        ScriptError: says what is wrong with the file.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as e:
        raise ScriptError(f"{path}: {e.strerror}") from e
    except ValueError as e:
        raise ScriptError(f"{path}: not JSON: {e}") from e
    messages = data.get("messages") if isinstance(data, dict) else data
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise ScriptError(f"{path}: expected a list of chat messages, or an object with one under `messages`")
    opening: list[Message] = []
    turns: list[list[str]] = []
    answered = False
    for message in messages:
        if message["role"] == "assistant":
            answered = True
            turns.append([])
        elif not answered:
            opening.append({"role": message["role"], "content": _text(message)})
        else:
            turns[-1].append(_text(message))
    turns = [t for t in turns if t]
    if not opening or not turns:
        raise ScriptError(f"{path}: needs a message before the first answer, and at least one after it")
    tools = data.get("tools") if isinstance(data, dict) else None
    if tools and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise ScriptError(f"{path}: `tools` must be a list of OpenAI tool definitions")
    called = {name for message in messages if message["role"] == "assistant" for name in _called(message)}
    return Script(opening, turns, tools or [_tool(name, "A tool of the recorded agent.") for name in sorted(called)])


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content)


def _called(message: Message) -> list[str]:
    """Names of the tools that an answer calls; what is no tool call is left out."""
    calls = message.get("tool_calls")
    functions = [c.get("function") for c in calls if isinstance(c, dict)] if isinstance(calls, list) else []
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]


def reply(answer: Message, texts: Sequence[str]) -> list[Message]:
    """The messages that follow an answer: results for the tools that it called, else a user's message.

    Args:
        answer: the assistant message.
        texts: what the script has for this turn. With more calls than texts, the rest get a short result.
    """
    calls = answer.get("tool_calls") or []
    if not calls:
        return [{"role": "user", "content": "\n\n".join(texts)}]
    texts = [*texts, *["(no output)"] * (len(calls) - len(texts))]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, texts, strict=False)
    ]
    rest = texts[len(calls) :]
    return [*results, {"role": "user", "content": "\n\n".join(rest)}] if rest else results
