"""Conversations over P and D, driven by hand, against one plain node."""

from collections.abc import Callable

import pytest

from kvreturn.core import wire
from kvreturn.sim import TEMPLATES, Timing
from unit.sim.cluster import CHAT, COLD, COMPLETIONS, Cluster, Json, Make, chunks, generate, ids, tokens

TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"properties": {"path": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "run", "parameters": {"properties": {"argv": {"type": "array"}}}}},
]
SYSTEM = {"role": "system", "content": "You are a careful engineer. " * 12}


def request(messages: list[Json], **more: object) -> Json:
    return {"messages": messages, "tools": TOOLS, "max_tokens": 120, "return_token_ids": True, **more}


def replay(answer: Json) -> list[Json]:
    """The assistant message as a client sends it back, and results for its tool calls."""
    message = answer["choices"][0]["message"]
    kept = {k: message[k] for k in ("role", "content", "reasoning", "tool_calls") if message.get(k) is not None}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result of {call['function']['arguments']}"}
        for call in message.get("tool_calls", [])
    ]
    return [kept, *results]


def said(answer: Json) -> Json:
    """The message, less what is random in it."""
    message = answer["choices"][0]["message"]
    return {**message, "tool_calls": [call["function"] for call in message.get("tool_calls", [])]}


def user(i: int) -> Json:
    return {"role": "user", "content": f"Step {i}: read the log, find the failing test and say what to change."}


def params_for(c: Cluster, handle: Json | None) -> Json:
    """The handle as a router sends it."""
    if handle is None:
        return COLD
    if c.p.config.connector == "kvreturn":
        return {**COLD, "kvreturn": {"v": 1, "handle": handle}}
    return {**handle, "do_remote_decode": True, "do_remote_prefill": False}


async def both_legs(c: Cluster, body: Json, handle: Json | None) -> tuple[Json, Json]:
    """A turn whose answer must be that of the plain node."""
    at_p, at_d = await c.turn(CHAT, body, params_for(c, handle))
    expected = await c.expected(CHAT, body)
    assert tokens(at_d) == tokens(expected)
    assert said(at_d) == said(expected)
    assert at_d["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
    return at_p, at_d


@pytest.mark.parametrize("connector", ["stock", "kvreturn"])
@pytest.mark.parametrize("caching", [True, False])
async def test_an_honest_conversation_computes_only_what_is_new(
    cluster: Make, connector: str, *, caching: bool
) -> None:
    c = await cluster(connector=connector, prefix_caching=caching, recompute_threshold=0)
    messages, handle = [SYSTEM], None
    held = 0
    for i in range(6):
        messages.append(user(i))
        before = c.p.stats.computed_tokens
        at_p, at_d = await both_legs(c, request(messages), handle)
        prompt = at_p["usage"]["prompt_tokens"]
        # What D held is not computed again (but for the last token, where all is known).
        assert c.p.stats.computed_tokens - before <= prompt - held
        cached = at_p["kv_transfer_params"]["remote_prefill_cached_tokens"]
        assert cached >= held
        # D shows the client P's hit, not the blocks that it pulled itself.
        assert at_d["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        handle = at_d["kv_transfer_params"]
        held = handle["remote_num_tokens"]
        messages += replay(at_d)
    assert c.d.stats.pins == 1


NASTY: dict[str, Callable[[list[Json], Json], tuple[list[Json], Json]]] = {
    "goes on": lambda messages, body: (messages, body),
    "drops reasoning": lambda messages, body: (
        [{k: v for k, v in m.items() if k != "reasoning"} for m in messages],
        body,
    ),
    "edits the first message": lambda messages, body: ([{**SYSTEM, "content": "Be brief. " * 40}, *messages[1:]], body),
    "regenerates": lambda messages, body: (messages[:-1], body) if len(messages) > 2 else (messages, body),
    "starts over": lambda messages, body: (messages[:2], body),
    "edits the last message": lambda messages, body: ([*messages[:-1], {**messages[-1], "content": "Other."}], body),
    "other tools": lambda messages, body: (messages, {**body, "tools": TOOLS[:1]}),
    "no thinking": lambda messages, body: (messages, {**body, "chat_template_kwargs": {"enable_thinking": False}}),
    "other salt": lambda messages, body: (messages, {**body, "cache_salt": "salt"}),
    "other model": lambda messages, body: (messages, {**body, "model": "lora"}),
    "reorders arguments": lambda messages, body: (respelled(messages), body),
    "continues the message": lambda messages, body: (
        [*messages, {"role": "assistant", "content": "The reason is"}],
        {**body, "add_generation_prompt": False, "continue_final_message": True},
    ),
}


def without_reasoning(message: Json) -> Json:
    return {k: v for k, v in message.items() if k != "reasoning"}


def respelled(messages: list[Json]) -> list[Json]:
    out: list[Json] = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": call["function"]["arguments"].replace('": ', '":')}}
            for call in message.get("tool_calls", [])
        ]
        out.append({**message, "tool_calls": calls} if calls else message)
    return out


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@pytest.mark.parametrize("tokenizer", ["exact", "blurry"])
@pytest.mark.parametrize("caching", [True, False])
async def test_with_proof_no_history_gets_a_wrong_answer(
    cluster: Make, template: str, tokenizer: str, *, caching: bool
) -> None:
    c = await cluster(
        connector="kvreturn",
        template=template,
        tokenizer=tokenizer,
        prefix_caching=caching,
        adapters=("lora",),
    )
    messages, handle = [SYSTEM], None
    for i, (name, change) in enumerate(NASTY.items()):
        messages.append(user(i))
        sent, body = change(messages, request([]))
        body["messages"] = sent
        _, at_d = await both_legs(c, body, handle)
        handle = at_d["kv_transfer_params"]
        assert handle is not None, name
        messages += replay(at_d)
        await c.clock.advance(40)  # the finer of the dated templates gets another minute now and then
    if not caching:
        assert c.p.stats.read_tokens > 0
    assert c.p.stats.hung_requests == c.p.stats.leaked_blocks == 0
    assert c.d.stats.pins == 1


@pytest.mark.parametrize(
    ("template", "tokenizer"),
    [("drop_thinking", "exact"), ("tools_last", "exact"), ("dated_minute", "exact"), ("plain", "blurry")],
)
async def test_without_proof_the_same_histories_go_wrong(cluster: Make, template: str, tokenizer: str) -> None:
    """Equal messages do not make equal tokens: what a router that trusts its fingerprints would do."""
    c = await cluster(template=template, tokenizer=tokenizer, prefix_caching=False)
    messages, handle, wrong = [SYSTEM], None, 0
    for i in range(6):
        messages.append(user(i))
        body = request(messages)
        _, at_d = await c.turn(CHAT, body, params_for(c, handle))
        expected = await c.expected(CHAT, body)
        wrong += tokens(at_d) != tokens(expected)
        handle = at_d["kv_transfer_params"]
        messages += replay(expected)
        await c.clock.advance(61)
    assert wrong > 0


async def test_branches_of_one_conversation_have_handles_of_their_own(cluster: Make) -> None:
    c = await cluster(connector="kvreturn", prefix_caching=False)
    root = [SYSTEM, user(0)]
    _, first = await both_legs(c, request(root), None)
    trunk = [*root, *replay(first)]
    handle = first["kv_transfer_params"]
    ends = []
    for i in (1, 2):  # the second branch gets nothing: the handle is spent
        _, at_d = await both_legs(c, request([*trunk, user(i)]), handle)
        ends.append(([*trunk, user(i), *replay(at_d)], at_d["kv_transfer_params"]))
    before = c.p.stats.read_tokens
    for messages, own in ends:
        at_p, _ = await both_legs(c, request([*messages, user(3)]), own)
        got = wire.load_report(at_p["kv_transfer_params"]["kvreturn"])
        assert got.read == own["remote_num_tokens"]
    assert c.p.stats.read_tokens - before == sum(own["remote_num_tokens"] for _, own in ends)


async def test_a_dropped_thinking_part_is_proven_up_to_where_it_was(cluster: Make) -> None:
    c = await cluster(connector="kvreturn", template="drop_thinking", prefix_caching=False)
    _, first = await both_legs(c, request([SYSTEM, user(0)]), None)
    turn_1 = first["usage"]["prompt_tokens"]
    at_p, _ = await both_legs(c, request([SYSTEM, user(0), *replay(first), user(1)]), first["kv_transfer_params"])
    got = wire.load_report(at_p["kv_transfer_params"]["kvreturn"])
    # The generated part begins with the thinking mark, which the second prompt lacks: the first prompt is common.
    assert got.read == got.proven == turn_1 - turn_1 % 16


@pytest.mark.parametrize("tokenizer", ["exact", "blurry"])
async def test_a_router_can_prove_for_a_stock_prefill_node(cluster: Make, tokenizer: str) -> None:
    c = await cluster(d={"connector": "kvreturn"}, tokenizer=tokenizer, prefix_caching=False)
    messages, handle, read = [SYSTEM], None, 0
    for i in range(5):
        messages.append(user(i))
        body = request(messages)
        attached = None
        if handle is not None:
            _, rendered = await c.post(c.p, "/tokenize", {k: body[k] for k in ("messages", "tools")})
            proof, held = wire.load_proof(handle["kvreturn"]), handle["remote_num_tokens"]
            proven = wire.proven_tokens(proof, held, rendered["tokens"], wire.chain_seed(b""))
            blocks = [handle["remote_block_ids"][0][: -(-proven // 16)]]
            attached = {**handle, "remote_num_tokens": proven, "remote_block_ids": blocks}
            read += proven
        _, at_d = await both_legs(c, body, attached)
        handle = at_d["kv_transfer_params"]
        messages += replay(at_d)
    assert c.p.stats.read_tokens == read > 1_000


@pytest.mark.parametrize("template", ["plain", "keep_thinking"])
async def test_a_streamed_answer_says_the_same_as_a_whole_one(cluster: Make, template: str) -> None:
    c = await cluster(template=template)
    kinds = set()
    for i in range(12):
        body = {k: v for k, v in request([SYSTEM, user(i)]).items() if k != "return_token_ids"}
        whole = (await c.expected(CHAT, body))["choices"][0]
        parts: Json = {"content": "", "reasoning": "", "calls": []}
        for event in chunks(await c.stream(c.oracle, CHAT, body)):
            delta = event["choices"][0]["delta"]
            parts["content"] += delta.get("content") or ""
            parts["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    parts["calls"].append([call["function"]["name"], ""])
                else:
                    parts["calls"][call["index"]][1] += call["function"]["arguments"]
            finish = event["choices"][0]["finish_reason"]
        message: Json = whole["message"]
        calls = [[x["function"]["name"], x["function"]["arguments"]] for x in message.get("tool_calls", [])]
        assert parts["content"] == (message["content"] or "")
        assert parts["reasoning"] == (message["reasoning"] or "")
        if finish != "length":  # a call that was cut off is text in a whole answer
            assert parts["calls"] == calls
        assert finish == whole["finish_reason"]
        kinds.add((finish, bool(message["content"]), len(calls)))
    assert {finish for finish, _, _ in kinds} >= {"stop", "tool_calls"}


async def test_eager_return_of_the_whole_conversation_as_token_ids(cluster: Make) -> None:
    """feasibility.md, form A: stream to the first token, then leave."""
    timing = Timing(prefill_rate=0, decode_rate=10, transfer_rate=0, overhead=0)
    c = await cluster(p={"timing": timing})
    prompt = ids(1, 200)
    _, at_d = await c.turn(COMPLETIONS, generate(prompt, 1))
    _, at_d = await c.turn(COMPLETIONS, generate(prompt, 100))
    full = prompt + tokens(at_d)
    params = {**at_d["kv_transfer_params"], "do_remote_decode": True, "do_remote_prefill": False}
    body: Json = {"prompt": full, "stream": True, "max_tokens": 16, "ignore_eos": True, "kv_transfer_params": params}
    await c.until(lambda: c.d.stats.pins == 2)
    computed = c.p.stats.computed_tokens
    async with c.session.post(c.urls[id(c.p)] + COMPLETIONS, json=body) as answer:
        await answer.content.readline()
        answer.close()
    await c.until(lambda: c.p.stats.running == 0)
    assert c.p.stats.computed_tokens - computed == 1
    assert c.p.stats.leases == 0
    assert c.d.stats.pins == 1  # that of the first turn
    at_p, _ = await c.turn(COMPLETIONS, generate(full + ids(2, 40)))
    assert at_p["usage"]["prompt_tokens_details"]["cached_tokens"] == 288  # whole blocks of 300


async def test_eager_return_to_a_prefill_node_without_the_flag(cluster: Make) -> None:
    """feasibility.md, form B: as if P were the decode side."""
    c = await cluster(p={"bidirectional": False})
    prompt = ids(1, 200)
    _, at_d = await c.turn(COMPLETIONS, generate(prompt, 57))
    held = at_d["kv_transfer_params"]["remote_num_tokens"]
    full = prompt + tokens(at_d)
    params = {**at_d["kv_transfer_params"], "do_remote_decode": False, "do_remote_prefill": True}
    body = {"prompt": full[:held], "max_tokens": 1, "kv_transfer_params": params}
    status, answer = await c.post(c.p, COMPLETIONS, body)
    assert (status, answer["kv_transfer_params"]) == (200, None)
    assert (c.p.stats.leases, c.p.stats.pins, c.d.stats.pins) == (0, 0, 0)
    at_p, _ = await c.turn(COMPLETIONS, generate(full + ids(2, 40)))
    assert at_p["usage"]["prompt_tokens_details"]["cached_tokens"] == 256


async def test_forwarded_token_ids_spare_d_the_tokenizing(cluster: Make) -> None:
    c = await cluster(template="dated_minute")
    body = request([SYSTEM, user(0)])
    expected = await c.expected(CHAT, body)
    _, at_p = await c.prefill(CHAT, body)
    await c.clock.advance(25)  # within the lease, into the next minute
    await c.clock.advance(5 + 31)
    params = {**at_p["kv_transfer_params"], "prompt_token_ids": at_p["prompt_token_ids"]}
    _, at_d = await c.post(c.d, CHAT, {**body, "kv_transfer_params": params})
    assert at_d["prompt_token_ids"] == expected["prompt_token_ids"]
    assert at_d["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]
    for wrong in ([], [-1], [10**9], "x", [True]):
        status, error = await c.post(c.d, CHAT, {**body, "kv_transfer_params": {"prompt_token_ids": wrong}})
        assert (status, error["error"]["param"]) == (400, "kv_transfer_params.prompt_token_ids")


async def test_a_prompt_that_d_renders_on_another_day_gets_the_wrong_blocks(cluster: Make) -> None:
    c = await cluster(template="dated_minute")
    body = request([SYSTEM, user(0)])
    await c.clock.advance(59)
    _, at_p = await c.prefill(CHAT, body)
    await c.clock.advance(2)
    _, at_d = await c.post(c.d, CHAT, {**body, "kv_transfer_params": at_p["kv_transfer_params"]})
    assert tokens(at_d) != tokens(await c.expected(CHAT, body))
