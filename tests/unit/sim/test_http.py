"""The API: shapes of real answers, errors, and what tests need besides."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from unit.sim.cluster import CHAT, COMPLETIONS, Json, Make, chunks, generate, ids, tokens

SAMPLES = Path(__file__).parents[4] / "shared" / "samples"
MESSAGES = [{"role": "user", "content": "Say what the module does. " * 20}]
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"properties": {"x": {"type": "integer"}}}}}
HANDLE_KEYS = 13


def sample(name: str) -> str:
    path = SAMPLES / name
    if not path.exists():
        pytest.skip(f"{name}: samples recorded from real nodes are not here")
    return path.read_text()


def same_shape(ours: object, theirs: object, where: str = "") -> None:
    """Same members in the same order, same types; of lists, the first items."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), where
        mine, real = list(ours), list(theirs)
        if "remote_block_ids" in theirs:  # what a connector adds to a handle differs
            mine, real = mine[:HANDLE_KEYS], real[:HANDLE_KEYS]
        assert mine == real, where
        for key in real:
            same_shape(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list):
        assert isinstance(ours, list), where
        if theirs:
            same_shape(ours[0], theirs[0], f"{where}[0]")
    else:
        assert type(ours) is type(theirs), where


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_whole_answers_have_the_shape_of_real_ones(cluster: Make, api: str, turn: int) -> None:
    real = [json.loads(sample(f"{api}_turn{turn}_{node}_response.json")) for node in "PD"]
    c = await cluster(side_host="127.0.0.1")
    body: Json = {"model": "sim", "temperature": 0, "seed": 0, "return_token_ids": True, "ignore_eos": True}
    body |= {"messages": MESSAGES, "max_tokens": 48} if api == "chat" else {"prompt": "Say. " * 40, "max_tokens": 48}
    handle = None
    for _ in range(turn):
        ours = await c.turn(CHAT if api == "chat" else COMPLETIONS, body, handle)
        handle = ours[1]["kv_transfer_params"]
    for mine, theirs in zip(ours, real, strict=True):
        theirs.pop("_s")  # added by the script that recorded it
        same_shape(mine, theirs)
    assert [mine["usage"]["completion_tokens"] for mine in ours] == [1, 48]


def terminal(events: list[Json]) -> list[Json]:
    return [event for event in events if event["choices"] and event["choices"][0]["finish_reason"]]


STREAMS: list[tuple[str, str, Json]] = [
    ("chat", CHAT, {}),
    ("chat_usage", CHAT, {"stream_options": {"include_usage": True}}),
    ("chat_usage_continuous", CHAT, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("chat_n2", CHAT, {"n": 2, "temperature": 0.9, "stream_options": {"include_usage": True}}),
    ("completions", COMPLETIONS, {}),
    ("completions_usage", COMPLETIONS, {"stream_options": {"include_usage": True}}),
    ("completions_n2", COMPLETIONS, {"n": 2, "temperature": 0.9}),
]


@pytest.mark.parametrize("recorded", ["stock", "plugin"])
@pytest.mark.parametrize(("name", "path", "more"), STREAMS, ids=[name for name, _, _ in STREAMS])
async def test_chunks_have_the_shape_of_real_ones(
    cluster: Make, recorded: str, name: str, path: str, more: Json
) -> None:
    connector = {"stock": "stock", "plugin": "kvreturn"}[recorded]
    events = [line[6:] for line in sample(f"sse_{recorded}_{name}.txt").split("\n\n") if line.startswith("data: ")]
    real = chunks(events)
    c = await cluster(connector=connector, side_host="127.0.0.1")
    body: Json = {"ignore_eos": True, "max_tokens": 20, "messages": MESSAGES, "prompt": "Say. " * 40, **more}
    _, at_p = await c.prefill(path, body)
    raw = await c.stream(c.d, path, {**body, "kv_transfer_params": at_p["kv_transfer_params"]})
    ours = chunks(raw)
    for line, parsed in zip(raw, ours, strict=False):
        assert line == json.dumps(parsed, ensure_ascii=False, separators=(",", ":"))
    for i in (0, 5, -1):
        same_shape(ours[i], real[i])
    for mine, theirs in zip(terminal(ours), terminal(real), strict=True):
        same_shape(mine, theirs)


@pytest.mark.parametrize(
    ("name", "more", "finish"),
    [
        ("tool_named", {"tool_choice": {"type": "function", "function": {"name": "lookup"}}}, "stop"),
        ("tool_required", {"tool_choice": "required"}, "tool_calls"),
    ],
)
async def test_tool_call_chunks_have_the_shape_of_real_ones(cluster: Make, name: str, more: Json, finish: str) -> None:
    events = [line[6:] for line in sample(f"sse_plugin_chat_{name}.txt").split("\n\n") if line.startswith("data: ")]
    role, head, arguments, end = chunks(events)
    c = await cluster(connector="kvreturn")
    body: Json = {"messages": MESSAGES, "tools": [TOOL], "parallel_tool_calls": False, **more}
    _, at_p = await c.prefill(CHAT, body)
    ours = chunks(await c.stream(c.d, CHAT, {**body, "kv_transfer_params": at_p["kv_transfer_params"]}))
    for mine, theirs in ((ours[0], role), (ours[1], head), (ours[2], arguments), (ours[-1], end)):
        same_shape(mine, theirs)
    assert ours[-1]["choices"][0]["finish_reason"] == finish == end["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    ("tool_choice", "finish"),
    [
        ("none", "stop"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "lookup"}}, "stop"),
    ],
)
async def test_finish_reasons_of_tool_calls(cluster: Make, tool_choice: object, finish: str) -> None:
    c = await cluster()
    body: Json = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": tool_choice}
    _, answer = await c.post(c.d, CHAT, body)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == finish
    calls = choice["message"].get("tool_calls", [])
    assert [call["function"]["name"] for call in calls[:1]] == ([] if tool_choice == "none" else ["lookup"])
    assert (choice["message"]["content"] == "") == bool(calls)  # "" and not null, where a call was forced


async def test_a_stop_string_ends_a_stream_as_in_vllm(cluster: Make) -> None:
    events = [line[6:] for line in sample("sse_plugin_chat_stop_string.txt").split("\n\n") if line.startswith("data: ")]
    c = await cluster(connector="kvreturn")
    body: Json = {"messages": MESSAGES, "max_tokens": 20, "stop": [" "]}
    _, at_p = await c.prefill(CHAT, body)
    ours = chunks(await c.stream(c.d, CHAT, {**body, "kv_transfer_params": at_p["kv_transfer_params"]}))
    same_shape(ours[-1], chunks(events)[-1])
    assert ours[-1]["choices"][0]["stop_reason"] == " "
    assert "kv_transfer_params" not in ours[-1]
    assert c.d.stats.blocks_used == 0


TOOLS_REQUIRED: Json = {"messages": MESSAGES, "tools": [TOOL]}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, {"messages": []}, (400, "BadRequestError", "messages")),
        (CHAT, {}, (400, "Bad Request", "body.messages")),
        (CHAT, {"messages": "x"}, (400, "Bad Request", "body.messages")),
        (CHAT, {"messages": MESSAGES, "model": "gpt"}, (404, "NotFoundError", "model")),
        (CHAT, {"messages": [{"role": "wizard"}]}, (400, "BadRequestError", "messages")),
        (
            CHAT,
            {"messages": MESSAGES, "stream_options": {"include_usage": True}},
            (400, "Bad Request", "stream_options"),
        ),
        (CHAT, {"messages": MESSAGES, "max_tokens": 4, "min_tokens": 5}, (400, "BadRequestError", None)),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, (400, "BadRequestError", "max_tokens")),
        (
            CHAT,
            {"messages": MESSAGES, "max_completion_tokens": 10**6},
            (400, "BadRequestError", "max_completion_tokens"),
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a " * 70_000}]}, (400, "BadRequestError", "input_tokens")),
        (CHAT, {"messages": MESSAGES, "n": 2, "temperature": 0}, (400, "BadRequestError", None)),
        (CHAT, {"messages": MESSAGES, "temperature": 3}, (400, "BadRequestError", "temperature")),
        (CHAT, {"messages": MESSAGES, "top_p": 0}, (400, "BadRequestError", "top_p")),
        (CHAT, {"messages": MESSAGES, "stop": ""}, (400, "BadRequestError", None)),
        (CHAT, {"messages": MESSAGES, "tools": []}, (400, "Bad Request", "tools")),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, (400, "Bad Request", "tools.function")),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, (400, "Bad Request", "tool_choice")),
        (CHAT, {**TOOLS_REQUIRED, "tool_choice": {"function": {"name": "no"}}}, (400, "Bad Request", "tool_choice")),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, (400, "Bad Request", "top_logprobs")),
        (COMPLETIONS, {}, (400, "Bad Request", "prompt")),
        (COMPLETIONS, {"prompt": ""}, (400, "Bad Request", "prompt")),
        (COMPLETIONS, {"prompt": [[]]}, (400, "BadRequestError", "prompt")),
        (COMPLETIONS, {"prompt": [10**7]}, (400, "BadRequestError", "prompt")),
        (COMPLETIONS, {"prompt": "x", "model": "gpt"}, (404, "NotFoundError", "model")),
        (COMPLETIONS, {"prompt": "x", "cache_salt": ""}, (400, "Bad Request", "body.cache_salt")),
        ("/tokenize", {}, (400, "Bad Request", "body.prompt")),
        ("/tokenize", {"prompt": "x", "model": "gpt"}, (404, "NotFoundError", "model")),
        ("/detokenize", {"tokens": [10**7]}, (400, "BadRequestError", "tokens")),
        ("/v1/unknown", {}, (404, "Not Found", None)),
        ("/v1/models", {}, (405, "Method Not Allowed", None)),
    ],
)
async def test_errors(cluster: Make, path: str, body: Json, expected: tuple[int, str, str | None]) -> None:
    c = await cluster()
    status, error = await c.post(c.d, path, body)
    assert list(error) == ["error"]
    assert list(error["error"]) == ["message", "type", "param", "code"]
    assert (status, error["error"]["type"], error["error"]["param"]) == expected
    assert error["error"]["code"] == status
    assert error["error"]["message"]


async def test_a_body_that_is_no_json_is_a_400(cluster: Make) -> None:
    c = await cluster()
    async with c.session.post(c.urls[id(c.d)] + CHAT, data=b'{"messages":') as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "Bad Request"


async def test_an_error_in_a_stream_is_an_event(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False})
    prompt = ids(1, 200)
    _, at_d = await c.turn(COMPLETIONS, generate(prompt))
    await c.clock.advance(480)
    params = {**at_d["kv_transfer_params"], "do_remote_prefill": False, "do_remote_decode": True}
    events = await c.stream(c.p, COMPLETIONS, {"prompt": prompt + tokens(at_d), "kv_transfer_params": params})
    assert events == [
        '{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}',
        "[DONE]",
    ]


async def test_tokenize_counts_what_the_api_counts(cluster: Make) -> None:
    c = await cluster(template="keep_thinking")
    body: Json = {"messages": MESSAGES, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    _, rendered = await c.post(c.p, "/tokenize", body)
    _, answer = await c.post(c.p, CHAT, {**body, "max_tokens": 1, "return_token_ids": True})
    assert list(rendered) == ["count", "max_model_len", "tokens", "token_strs"]
    assert rendered["tokens"] == answer["prompt_token_ids"]
    assert rendered["count"] == len(rendered["tokens"]) == answer["usage"]["prompt_tokens"]
    assert (rendered["max_model_len"], rendered["token_strs"]) == (65_536, None)
    _, text = await c.post(c.p, "/tokenize", {"prompt": "a file", "return_token_strs": True})
    assert text["token_strs"] == ["a", " file"]
    _, back = await c.post(c.p, "/detokenize", {"tokens": text["tokens"]})
    assert back == {"prompt": "a file"}


async def test_models_version_and_health(cluster: Make) -> None:
    c = await cluster(adapters=("lora",))
    _, models = await c.get(c.d, "/v1/models")
    assert [(m["id"], m["parent"], m["max_model_len"]) for m in json.loads(models)["data"]] == [
        ("sim", None, 65_536),
        ("lora", "sim", None),
    ]
    assert await c.get(c.d, "/version") == (200, '{"version":"0.32.0"}')
    assert (await c.get(c.d, "/health"))[0] == 200
    _, answer = await c.post(c.d, CHAT, {"messages": MESSAGES, "model": "lora", "max_tokens": 5})
    assert answer["model"] == "lora"


async def test_the_prefix_cache_can_be_reset_while_nothing_runs(cluster: Make) -> None:
    c = await cluster()
    for _ in range(2):
        await c.post(c.d, CHAT, {"messages": MESSAGES, "max_tokens": 5})
    found = c.d.stats.local_tokens
    assert found > 0
    assert await c.post(c.d, "/reset_prefix_cache", {}) == (200, {"success": True})
    await c.post(c.d, CHAT, {"messages": MESSAGES, "max_tokens": 5})
    assert c.d.stats.local_tokens == found


def values(metrics: str) -> dict[str, float]:
    """As a scraper sees it: name, and source where there is one."""
    out = {}
    for line in metrics.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            source = name.partition('source="')[2].partition('"')[0]
            out[name.partition("{")[0].removeprefix("vllm:") + (f"[{source}]" if source else "")] = float(value)
    return out


async def test_metrics(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False})
    prompt = ids(1, 200)
    _, at_d = await c.turn(COMPLETIONS, generate(prompt))
    await c.turn(COMPLETIONS, generate(prompt + tokens(at_d) + ids(2, 60)), at_d["kv_transfer_params"])
    p = values((await c.get(c.p, "/metrics"))[1])
    d = values((await c.get(c.d, "/metrics"))[1])
    assert p["external_prefix_cache_hits_total"] == 223
    assert p["external_prefix_cache_queries_total"] == 484
    assert p["prompt_tokens_by_source_total[external_kv_transfer]"] == 223
    assert p["prompt_tokens_by_source_total[local_compute]"] == 200 + 61
    assert p["nixl_bytes_transferred_sum"] == 223 * 131_072
    assert p["nixl_bytes_transferred_count"] == 1
    assert d["prefix_cache_queries_total"] == 484
    assert d["prefix_cache_hits_total"] == 208  # 13 whole blocks of the first turn
    assert d["generation_tokens_total"] == 48
    # vLLM does not count the last token of a prompt that was loaded whole, though it is computed.
    sources = {"local_compute": 0, "local_cache_hit": 208, "external_kv_transfer": 200 + 284 - 208}
    assert {name: d[f"prompt_tokens_by_source_total[{name}]"] for name in sources} == sources
    assert d["prompt_tokens_total"] == sum(sources.values())
    # The second turn's 307 tokens (20 blocks) are pinned; the first turn's pin was read.
    assert d["kv_cache_usage_perc"] == pytest.approx(20 / 8_192)
    labels = 'block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="8193"'
    assert f"vllm:cache_config_info{{{labels}}} 1.0\n" in (await c.get(c.d, "/metrics"))[1]
    assert "nixl_bytes_transferred_sum" not in values((await c.get(c.oracle, "/metrics"))[1])


async def test_metrics_of_a_node_under_pressure(cluster: Make) -> None:
    c = await cluster(connector="kvreturn", num_blocks=33, max_model_len=512)
    await c.turn(COMPLETIONS, generate(ids(1, 200)))
    await c.prefill(COMPLETIONS, generate(ids(2, 400)))  # 25 of P's 32 blocks
    waiting = asyncio.create_task(c.prefill(COMPLETIONS, generate(ids(3, 200))))
    await c.until(lambda: c.p.stats.waiting == 1)
    text = (await c.get(c.p, "/metrics"))[1]
    assert 'num_requests_waiting_by_reason{engine="0",model_name="sim",reason="capacity"} 1.0' in text
    assert 'num_requests_waiting_by_reason{engine="0",model_name="sim",reason="deferred"} 0.0' in text
    p, d = values(text), values((await c.get(c.d, "/metrics"))[1])
    assert (p["num_requests_running"], p["num_requests_waiting"], p["num_preemptions_total"]) == (0, 1, 0)
    assert p["kv_cache_usage_perc"] == pytest.approx(25 / 32)
    assert (d["kvreturn_pins"], d["kvreturn_pinned_blocks"]) == (1, 14)
    assert (d["kvreturn_early_releases_total"], d["kvreturn_pins_refused_total"]) == (0, 0)
    await c.clock.advance(31)
    await waiting


async def test_ids_of_answers(cluster: Make) -> None:
    c = await cluster()
    for path, prefix in ((CHAT, "chatcmpl-"), (COMPLETIONS, "cmpl-")):
        body = {"messages": MESSAGES, "prompt": "x", "max_tokens": 1}
        _, given = await c.post(c.d, path, body, **{"X-Request-Id": "abc"})
        _, made = await c.post(c.d, path, body)
        assert given["id"] == f"{prefix}abc"
        assert made["id"].startswith(prefix)
        assert len(made["id"]) == len(prefix) + 16


async def test_several_prompts_and_choices(cluster: Make) -> None:
    c = await cluster()
    prompts = [ids(1, 20), ids(2, 30)]
    body = {"prompt": prompts, "n": 2, "temperature": 1, "max_tokens": 5, "return_token_ids": True, "ignore_eos": True}
    _, answer = await c.post(c.d, COMPLETIONS, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert len({tuple(tokens(answer, i)) for i in range(4)}) == 4
    assert answer["usage"]["prompt_tokens"] == 50
    assert answer["usage"]["completion_tokens"] == 20
    _, single = await c.post(c.d, COMPLETIONS, generate(prompts[1], 5))
    assert tokens(single) == tokens(answer, 2)
    streamed: dict[int, list[int]] = {i: [] for i in range(4)}
    for event in chunks(await c.stream(c.d, COMPLETIONS, body)):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["token_ids"]
    assert streamed == {i: tokens(answer, i) for i in range(4)}


async def test_echo_and_logprobs(cluster: Make) -> None:
    c = await cluster()
    body = {"prompt": "look at the file", "max_tokens": 3, "ignore_eos": True, "logprobs": 1}
    _, plain = await c.post(c.d, COMPLETIONS, body)
    _, echoed = await c.post(c.d, COMPLETIONS, {**body, "echo": True})
    _, only = await c.post(c.d, COMPLETIONS, {**body, "echo": True, "max_tokens": 0})
    text = plain["choices"][0]["text"]
    assert echoed["choices"][0]["text"] == f"look at the file{text}"
    assert only["choices"][0]["text"] == "look at the file"
    found = echoed["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == echoed["choices"][0]["text"]
    assert found["tokens"][:4] == ["look", " at", " the", " file"]
    assert found["text_offset"][:5] == [0, 4, 7, 11, 16]
    assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == 7
    streamed = chunks(await c.stream(c.d, COMPLETIONS, {**body, "echo": True}))
    assert "".join(event["choices"][0]["text"] for event in streamed) == echoed["choices"][0]["text"]
    chat: Json = {"messages": MESSAGES, "max_tokens": 3, "ignore_eos": True, "logprobs": True}
    _, answer = await c.post(c.d, CHAT, chat)
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == answer["choices"][0]["message"]["content"]
    assert list(content[0]) == ["token", "logprob", "bytes", "top_logprobs"]


async def test_a_stop_string_is_never_shown_in_part(cluster: Make) -> None:
    c = await cluster()
    prompt = ids(4, 50)
    _, plain = await c.post(c.d, COMPLETIONS, generate(prompt, 40))
    text = plain["choices"][0]["text"]
    stop = text[60:75]
    for include in (False, True):
        body = generate(prompt, 40, stop=[stop, "never"], include_stop_str_in_output=include)
        _, answer = await c.post(c.d, COMPLETIONS, body)
        expected = text[: text.index(stop)] + (stop if include else "")
        assert answer["choices"][0]["text"] == expected
        assert answer["choices"][0]["stop_reason"] == stop
        streamed = chunks(await c.stream(c.d, COMPLETIONS, body))
        assert "".join(event["choices"][0]["text"] for event in streamed) == expected
    _, late = await c.post(c.d, COMPLETIONS, generate(prompt, 40, stop=[stop], min_tokens=30))
    assert len(tokens(late)) >= 30


async def test_limits(cluster: Make) -> None:
    c = await cluster()
    prompt = ids(5, 50)
    _, natural = await c.post(c.d, COMPLETIONS, {"prompt": prompt, "max_tokens": 500, "return_token_ids": True})
    length = len(tokens(natural))
    assert natural["choices"][0]["finish_reason"] == "stop"
    assert natural["choices"][0]["stop_reason"] is None
    _, more = await c.post(
        c.d, COMPLETIONS, {"prompt": prompt, "max_tokens": 500, "min_tokens": length + 5, "return_token_ids": True}
    )
    assert length + 5 < len(tokens(more)) <= length + 12
    assert tokens(more)[: length - 1] == tokens(natural)[:-1]  # all but the end token
    _, default = await c.post(c.d, COMPLETIONS, {"prompt": prompt, "ignore_eos": True})
    assert default["usage"]["completion_tokens"] == 16
    small = await cluster(max_model_len=64)
    _, full = await small.post(small.d, COMPLETIONS, generate(ids(5, 54), 10))
    assert full["choices"][0]["finish_reason"] == "length"
    assert (await small.post(small.d, COMPLETIONS, generate(ids(5, 54), 11)))[0] == 400
    _, open_end = await small.post(small.d, CHAT, {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True})
    assert open_end["usage"]["total_tokens"] == 64


async def test_reasoning_can_be_left_out(cluster: Make) -> None:
    c = await cluster(template="keep_thinking")
    body: Json = {"messages": MESSAGES}
    _, shown = await c.post(c.d, CHAT, body)
    _, hidden = await c.post(c.d, CHAT, {**body, "include_reasoning": False})
    _, none = await c.post(c.d, CHAT, {**body, "chat_template_kwargs": {"enable_thinking": False}})
    _, low = await c.post(c.d, CHAT, {**body, "reasoning_effort": "none"})
    assert shown["choices"][0]["message"]["reasoning"]
    assert shown["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3
    assert hidden["choices"][0]["message"]["reasoning"] is None
    assert hidden["choices"][0]["message"]["content"] == shown["choices"][0]["message"]["content"]
    assert none["choices"][0]["message"] == low["choices"][0]["message"]
    assert none["choices"][0]["message"]["reasoning"] is None


async def test_a_call_that_was_cut_off_is_text(cluster: Make) -> None:
    c = await cluster()
    body: Json = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "max_tokens": 8}
    _, answer = await c.post(c.d, CHAT, body)
    message = answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "tool_calls" not in message
    assert message["content"].startswith('<tool_call>\n{"name":')


async def test_requests_are_remembered_as_they_came(cluster: Make) -> None:
    c = await cluster(keep_requests=2)
    raw = b'{"prompt" :  "x",\n"max_tokens":1}'
    for _ in range(3):
        headers = {"Content-Type": "application/json", "X-Own": "1"}
        async with c.session.post(c.urls[id(c.d)] + COMPLETIONS, data=raw, headers=headers) as answer:
            assert answer.status == 200
    assert len(c.d.requests) == 2
    asked = c.d.requests[-1]
    assert (asked.path, asked.body, asked.headers["x-own"]) == (COMPLETIONS, raw, "1")


async def test_faults(cluster: Make) -> None:
    c = await cluster()
    body: Json = {"prompt": "x " * 100, "max_tokens": 1}
    c.p.faults.add(COMPLETIONS, "status", times=2, status=503)
    assert [(await c.prefill(COMPLETIONS, body))[0] for _ in range(3)] == [503, 503, 200]
    assert (await c.prefill(CHAT, {"messages": MESSAGES}))[0] == 200  # another path

    c.p.faults.add(COMPLETIONS, "malformed")
    with pytest.raises(json.JSONDecodeError):
        await c.prefill(COMPLETIONS, body)

    c.p.faults.add(COMPLETIONS, "drop")
    with pytest.raises(aiohttp.ClientError):
        await c.prefill(COMPLETIONS, body)

    c.p.faults.add(COMPLETIONS, "omit_params")
    assert (await c.prefill(COMPLETIONS, body))[1]["kv_transfer_params"] is None

    c.p.faults.add(COMPLETIONS, "delay", seconds=3.0)
    assert (await c.elapsed(c.prefill(COMPLETIONS, body), 3.0))[0] == 200

    c.p.faults.add(COMPLETIONS, "hang")
    task = asyncio.create_task(c.prefill(COMPLETIONS, body))
    await asyncio.sleep(0.02)
    await c.clock.advance(1_000)
    assert not task.done()
    task.cancel()

    c.p.faults.add(COMPLETIONS, "status", times=9)
    c.p.faults.clear()
    assert (await c.prefill(COMPLETIONS, body))[0] == 200
