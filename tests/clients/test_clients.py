"""Client libraries as they come from PyPI and npm hold a conversation with a tool, through the whole product.

`make test-clients` installs them into an environment of their own; the outcomes of their turns are printed.
"""

import asyncio
import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from support.gateway import Product, product

_HERE = Path(__file__).parent
_PYTHON = os.environ.get("KVRETURN_CLIENTS_PYTHON", str(_HERE.parents[1] / ".venv-clients/bin/python"))

pytestmark = [pytest.mark.clients, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Setting:
    """How one conversation is held.

    Attributes:
        how: whether the client asks for streams.
        returns: `return` of the router.
        template: of the nodes. `plain` renders the arguments of tool calls as text, so it tells whether a client writes
            them anew; `drop_thinking` drops reasoning before the last user message, `keep_thinking` none.
    """

    how: Literal["whole", "stream"]
    returns: Literal["lazy", "eager"]
    template: Literal["plain", "drop_thinking", "keep_thinking"]

    def __str__(self) -> str:
        return f"{self.how}, {self.returns}, {self.template}"


@dataclass(frozen=True)
class Client:
    """A script of this folder.

    Attributes:
        script: its name.
        api: what it is to use.
        alters: what it replays otherwise than it came, `arguments` or `reasoning`: from there on the prompt is another.
    """

    script: str
    api: str
    alters: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.script} {self.api}"

    def allowed(self, setting: Setting) -> set[str]:
        """Outcomes of turns after the first."""
        lost = {"plain": "arguments" in self.alters, "keep_thinking": "reasoning" in self.alters, "drop_thinking": True}
        return {"hit", "partial_hit"} if lost[setting.template] else {"hit"}


_SETTINGS = (
    Setting("whole", "lazy", "plain"),
    Setting("stream", "eager", "plain"),
    Setting("stream", "lazy", "drop_thinking"),
    Setting("whole", "lazy", "keep_thinking"),
    Setting("stream", "eager", "keep_thinking"),
)
_ARGUMENTS = frozenset({"arguments"})
_REASONING = frozenset({"reasoning"})
_CLIENTS = (
    Client("openai_client.py", "chat"),
    Client("openai_client.py", "completions"),
    Client("openai_client.py", "responses"),
    Client("anthropic_client.py", "messages"),
    Client("anthropic_client.py", "tool_runner"),
    Client("litellm_client.py", "openai"),
    Client("litellm_client.py", "hosted_vllm"),
    Client("litellm_client.py", "responses"),
    Client("langchain_client.py", "chat", _REASONING),
    Client("langchain_client.py", "responses", _REASONING),
    Client("openai_agents_client.py", "chat"),
    Client("openai_agents_client.py", "responses"),
    Client("pydantic_ai_client.py", "chat", _ARGUMENTS),
    Client("pydantic_ai_client.py", "responses", _ARGUMENTS),
    Client("pydantic_ai_client.py", "messages"),
    Client("node/openai_client.mjs", "chat", _REASONING),
    Client("node/openai_client.mjs", "responses"),
    Client("node/ai_client.mjs", "compatible", _ARGUMENTS),
    Client("node/ai_client.mjs", "chat", _ARGUMENTS | _REASONING),
    Client("node/ai_client.mjs", "responses", _ARGUMENTS | _REASONING),
    Client("node/ai_client.mjs", "messages"),
)


def _served(setting: Setting) -> contextlib.AbstractAsyncContextManager[Product]:
    changes: Any = {"return": setting.returns}
    return product("kvreturn", template=setting.template, cached=setting.returns == "eager", **changes)


async def _run(client: Client, runs: list[str]) -> list[Any]:
    """Let a client hold these conversations, in a process of its own; its transcripts."""
    program = "node" if client.script.endswith(".mjs") else _PYTHON
    process = await asyncio.create_subprocess_exec(
        program,
        str(_HERE / client.script),
        client.api,
        *runs,
        env={"PATH": os.environ["PATH"]},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, notes = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, notes.decode()
    transcripts: list[Any] = json.loads(out.splitlines()[-1])  # some print notes before it
    for transcript in transcripts:
        transcript["calls"].sort(key=json.dumps)  # pydantic-ai runs calls of one answer in threads, in any order
    return transcripts


@pytest.mark.parametrize("client", _CLIENTS, ids=str)
async def test_a_client_sees_no_difference_and_is_read_back_from_turn_2_on(client: Client) -> None:
    if client.script.endswith(".mjs") and not (_HERE / "node/node_modules").exists():
        pytest.skip("no npm packages: see `make clients`")
    async with contextlib.AsyncExitStack() as stack:
        pairs = [(s, await stack.enter_async_context(_served(s))) for s in _SETTINGS]
        runs = [f"{s.how}={url}" for s, there in pairs for url in (there.front.url, there.oracle)]
        transcripts = await _run(client, runs)
        for (setting, there), through, direct in zip(pairs, transcripts[::2], transcripts[1::2], strict=True):
            turns = sum(request.body != b"" for request in there.d[0].requests)
            outcomes = await there.front.outcomes(turns)
            print(f"{client}: {setting}: {', '.join(f'{n} {name}' for name, n in outcomes.items())}")
            assert through == direct
            assert turns >= 4
            assert outcomes.pop("first_turn") == 1
            assert set(outcomes) <= client.allowed(setting)
            moved = "read_back_tokens_total" if setting.returns == "lazy" else "returned_tokens_total"
            assert there.front.metric(moved) > 0
        assert any(transcript["calls"] for transcript in transcripts) is (client.api != "completions")
