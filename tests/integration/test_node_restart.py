"""A decode node that is restarted: nobody tries to read what died with its engine."""

from typing import Any

from support.gateway import client, product

LONG = "Tell me about the river and the town behind it. " * 8


async def test_handles_of_the_old_engine_are_not_tried_once_the_new_one_has_answered() -> None:
    async with product("kvreturn") as there:
        (d,), (p,) = there.d, there.p
        talks: list[Any] = [[{"role": "user", "content": f"{name}: {LONG}"}] for name in "abc"]
        async with client(there.front.url) as ours:

            async def turn(messages: Any) -> None:  # noqa: ANN401 - what the client takes
                answer = await ours.chat.completions.create(model="sim", messages=messages, max_tokens=8)
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
                messages += [{"role": "user", "content": "and then?"}]

            await turn(talks[0])
            await turn(talks[1])
            d.restart()
            await turn(talks[2])  # its handle is the new engine's
            failed = p.stats.failed_transfers
            await turn(talks[0])
            await turn(talks[1])
            await turn(talks[2])
        assert await there.front.outcomes(6) == {"first_turn": 3, "node_gone": 2, "hit": 1}
        assert p.stats.failed_transfers == failed
        assert there.front.metric("prefill_retries_total") == 0
        assert there.front.world
        (view,) = there.front.world.decode.snapshot()
        assert view.engines == (d.engine.id,)
