"""`bidirectional_kv_xfer` on one side only: said loudly, nothing hangs, every answer is right, nothing stays pinned."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine.conftest import JSON, Engine
from engine.test_conversation import Talk, question
from engine.test_misuse import until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(loop_scope="session", params=["prefill", "decode"])
async def off(engine: Engine, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The name of the node on which the flag is off."""
    name: str = request.param
    await engine.stop(name)
    await engine.start(name, bidirectional_kv_xfer=False)
    yield name
    await engine.stop(name)
    await engine.start(name)


async def test_a_conversation_is_computed_in_full(engine: Engine, off: str) -> None:
    pinned = await engine.metric(engine.d, "kvreturn_pins")
    assert any(line.startswith(off) and "bidirectional_kv_xfer is off" in line for line in engine.lines)
    outcomes = []
    async with Talk(engine) as talk:
        messages: list[JSON] = [{"role": "system", "content": f"Off on {off}"}]
        for turn in range(3):
            messages.append({"role": "user", "content": question(turn)})
            message, outcome, _, read = await talk.chat(messages)
            assert read == 0
            outcomes.append(outcome)
            messages.append(message)
    print(f"off on {off}: {outcomes}")
    if off == "prefill":
        assert outcomes == ["first_turn", "unproven", "unproven"]
        assert any("set it on both sides" in line for line in engine.lines)
        # The last turn's handle waits for a turn that does not come; those before it were given back unread.
        await until(engine, engine.d, "kvreturn_pins", pinned + 1)
    else:
        assert set(outcomes[1:]) == {"no_handle_from_decode"}
        await until(engine, engine.d, "kvreturn_pins", 0)
