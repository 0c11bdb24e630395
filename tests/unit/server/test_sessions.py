"""What a session id is good for: the nodes it was on, its own turn among equal ones, and a word in the log."""

import json
import logging

import pytest

from support.extproc import Envoy, Request, Response
from support.harness import Harness, harness
from support.nodes import StubPrefill, carried_handle, chat, decode_events, handle

P1, P2, D1, D2 = "10.0.0.1:8100", "10.0.0.3:8100", "10.0.0.2:8200", "10.0.0.4:8200"
POOLS = {"prefill": [P1, P2], "decode": [D1, D2]}
ID = "a-session-of-mine"


def router_of() -> Harness:
    return harness(pools=POOLS)


async def turn(
    router: Harness, *contents: str, session: str | None = ID, node: str = D2, name: str = "x-session-id"
) -> Envoy:
    """A chat turn that this node answers."""
    named = {name: session} if session else {}
    request = Request(pieces=[chat(*contents)], headers={"content-type": "application/json", **named})
    return await router.play(request, Response(decode_events(params=handle()), node=node))


def preferred(stub: StubPrefill) -> list[str | None]:
    return [ask.prefer for ask in stub.asks]


async def test_what_is_new_in_a_session_goes_where_it_was_last() -> None:
    router = router_of()
    await turn(router, "main thread")
    envoy = await turn(router, "a sub-agent's first words")
    assert preferred(router.stub) == [None, P1]
    assert envoy.upstream.node == D2
    other = await turn(router, "somebody else", session="another")
    assert preferred(router.stub)[2:] == [None]
    assert other.upstream.node == D1


async def test_an_idler_node_is_better_than_a_known_one() -> None:
    router = router_of()
    await turn(router, "main thread")
    router.world.decode.started(D2, 4)
    assert (await turn(router, "one")).upstream.node == D2
    router.world.decode.started(D2, 1)
    assert (await turn(router, "two")).upstream.node == D1
    assert {ask.slack for ask in router.asks[1:]} == {16_384}


async def test_a_conversation_goes_where_it_is_held_unless_that_is_far_busier_than_another_node() -> None:
    router = router_of()
    await turn(router, "Hi")
    router.world.decode.started(D2, 16)
    assert (await turn(router, "Hi", "Good morning", "And?")).upstream.node == D2
    assert {ask.slack for ask in router.asks[1:]} == {131_072}
    router.world.decode.started(D2, 1)
    assert (await turn(router, "Hi", "Good morning", "And?", "Good morning", "Then?")).upstream.node == D1
    assert carried_handle(router.asks[-1].body)  # P still reads what the other one holds
    assert router.outcomes()["hit"] == 2


async def test_a_lost_conversation_of_a_known_session_is_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvreturn.turn")
    router = router_of()
    await turn(router, "Hi")
    await turn(router, "compacted by the client", "Good morning", "And?")
    await turn(router, "never seen", "Good morning", "And?", session="another")
    lines = [r.getMessage() for r in caplog.records]
    assert [line.partition(" ")[0] for line in lines] == [
        "outcome=first_turn",
        "outcome=not_a_continuation(session_known)",
        "outcome=not_a_continuation",
    ]
    assert all(" session=x-session-id " in line for line in lines)
    assert ID not in caplog.text
    assert ID not in router.world.metrics.expose().decode()


async def test_of_equal_conversations_each_session_gets_its_own() -> None:
    """Both are true, and proven; but only one's decode node has the end of it."""
    for first, second in (("a", "b"), ("b", "a")):
        router = router_of()
        await turn(router, "Hi", session="a", node=D1)
        await turn(router, "Hi", session="b", node=D2)
        nodes = {"a": D1, "b": D2}
        for name in (first, second):
            envoy = await turn(router, "Hi", "Good morning", "And?", session=name)
            assert envoy.upstream.node == nodes[name]
        assert router.outcomes() == {"first_turn": 2, "hit": 2}


async def test_an_id_neither_hides_a_turn_nor_stands_for_it() -> None:
    router = router_of()
    await turn(router, "Hi", session="a")
    await turn(router, "Hi", "Good morning", "And?", session="b")  # the client has lost its id: the messages find it
    assert carried_handle(router.asks[1].body) == handle()
    await turn(router, "of the same session", "Good morning", "And?", session="b")
    assert carried_handle(router.asks[2].body) is None


async def test_fr78_threads_of_one_session_have_their_own_turns_and_nodes() -> None:
    router = router_of()
    kind = {"content-type": "application/json", "session-id": "s"}
    for thread, node in (("t1", D1), ("t2", D2)):
        request = Request(pieces=[chat(f"I am {thread}")], headers={**kind, "thread-id": thread})
        await router.play(request, Response(decode_events(params=handle()), node=node))
    for thread, node in (("t2", D2), ("t1", D1)):
        body = chat(f"I am {thread}", "Good morning", "And?")
        envoy = await router.play(Request(pieces=[body], headers={**kind, "thread-id": thread}), Response(node=node))
        assert envoy.upstream.node == node
    assert router.outcomes() == {"first_turn": 2, "hit": 2}


async def test_one_record_for_each_session_however_many_turns_it_has() -> None:
    router = router_of()
    for n in range(20):
        await turn(router, f"question {n}", node=(D1, D2)[n % 2])
    assert router.records == 20 + 1
    assert (await turn(router, "once more")).upstream.node == D2


async def test_a_session_that_failed_is_not_remembered() -> None:
    router = router_of()
    request = Request(pieces=[chat("Hi")], headers={"content-type": "application/json", "x-session-id": ID})
    await router.play(request, Response([b"{}"], status=500, node=D2))
    assert router.records == 0


async def test_conversation_id_is_not_for_nodes() -> None:
    router = router_of()
    body = b'{"model":"m", "conversation_id": "c", "messages":[{"role":"user","content":"conversation_id"}]}'
    envoy = await router.play(Request(pieces=[body]), Response(decode_events(), node=D1))
    plain = {"model": "m", "messages": [{"role": "user", "content": "conversation_id"}]}
    for sent in (envoy.upstream.body, router.asks[0].body):
        assert {k: v for k, v in json.loads(sent).items() if k in {*plain, "conversation_id"}} == plain
