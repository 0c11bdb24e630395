"""`/v1/responses` and `/v1/messages`: shapes of real answers, the official clients, what is kept."""

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from unit.sim.cluster import Cluster, Json, Make
from unit.sim.test_http import same_shape

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
REAL: dict[str, Any] = json.loads((Path(__file__).parents[2] / "vectors/vllm_apis.json").read_text())["answers"]
TEXT = "Say what the module does. " * 6
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = {
    RESPONSES: {
        "tools": [{"type": "function", "name": "lookup", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "lookup"},
    },
    MESSAGES: {
        "tools": [{"name": "lookup", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
}
TEMPLATES = {"thinking": "keep_thinking", "text": "plain", "tool": "plain", "stop": "plain"}


def request(path: str, kind: str, **more: Any) -> Json:  # noqa: ANN401 - JSON
    limit = {"tool": 400, "thinking": 4}.get(kind, 24)  # the real model did not get beyond its thinking
    body: Json = {"model": "sim", "temperature": 0, **more}
    if path == RESPONSES:
        body |= {"input": TEXT, "max_output_tokens": limit}
    else:
        body |= {"messages": [{"role": "user", "content": TEXT}], "max_tokens": limit}
    return body | (TOOLS[path] if kind == "tool" else {}) | ({"stop_sequences": ["e"]} if kind == "stop" else {})


def parsed(event: str) -> Json:
    name, _, data = event.partition("\ndata: ")
    body: Json = json.loads(data)
    assert name == f"event: {body['type']}"
    assert data == json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return body


def kind_of(event: Json) -> str:
    """What sort of event it is: of some, what they carry."""
    carried = event.get("content_block") or event.get("item") or event.get("part") or {}
    delta = event["delta"] if isinstance(event.get("delta"), dict) else {}
    return f"{event['type']} {carried.get('type', '')}{delta.get('type', '')}"


def in_a_row(events: list[Json]) -> list[str]:
    """The sorts of events, each of several in a row once."""
    kinds = [kind_of(event) for event in events]
    return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]


async def stream(c: Cluster, path: str, body: Json) -> list[Json]:
    async with c.session.post(c.urls[id(c.oracle)] + path, json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = await answer.text()
    assert text.endswith("\n\n")
    return [parsed(event) for event in text[:-2].split("\n\n")]


@pytest.mark.parametrize("name", [n for n, real in REAL.items() if isinstance(real, list)])
async def test_streams_have_the_events_of_real_ones_in_their_shape(cluster: Make, name: str) -> None:
    api, _, kind = name.partition("_")
    path = f"/v1/{api}"
    c = await cluster(template=TEMPLATES[kind])
    real = [parsed(event) for event in REAL[name]]
    ours = await stream(c, path, request(path, kind))
    for event in (*real, *ours):
        for tool in (event.get("response") or {}).get("tools", []):
            tool.clear()  # vLLM fills in what the client left out
    assert in_a_row(ours) == in_a_row(real)
    of_kind = {kind_of(event): event for event in real}
    for event in ours:
        same_shape(event, of_kind[kind_of(event)])
    numbers = [event["sequence_number"] for event in ours if path == RESPONSES]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("name", [n for n in REAL if n.endswith("_whole")])
async def test_whole_answers_have_the_shape_of_real_ones(cluster: Make, name: str) -> None:
    api, kind, _ = name.split("_")
    path = f"/v1/{api}"
    c = await cluster(template=TEMPLATES[kind])
    real, ours = json.loads(REAL[name]), await c.expected(path, request(path, kind))
    for answer in (real, ours):
        for tool in answer.get("tools", []):
            tool.clear()
    same_shape(ours, real)


async def test_errors_have_the_shape_of_real_ones(cluster: Make) -> None:
    c = await cluster(store_responses=True)
    kept = await c.expected(RESPONSES, request(RESPONSES, "text", request_id="resp_one"))
    assert kept["id"] == "resp_one"
    unknown = {"model": "no"}
    for method, path, body, name in [
        ("GET", f"{RESPONSES}/resp_none", None, "responses_missing"),
        ("POST", f"{RESPONSES}/resp_one/cancel", None, "responses_cancel"),
        ("POST", RESPONSES, request(RESPONSES, "text") | unknown, "responses_no_model"),
        ("POST", MESSAGES, request(MESSAGES, "text") | unknown, "messages_no_model"),
    ]:
        async with c.session.request(method, c.urls[id(c.oracle)] + path, json=body) as answer:
            real = json.loads(REAL[name].replace("tiny", "sim"))
            assert await answer.json() == real
            assert answer.status == real["error"].get("code", 404)


# --- what is kept ---


async def test_a_response_goes_on_from_the_text_of_the_one_before(cluster: Make) -> None:
    """Of an answer vLLM keeps its text, not its thinking; and no instructions."""
    c = await cluster(template="keep_thinking", store_responses=True)
    first = await c.expected(
        RESPONSES,
        request(RESPONSES, "text", instructions="Be brief.", request_id="resp_1") | {"max_output_tokens": 400},
    )
    (said,) = [part["text"] for item in first["output"] if item["type"] == "message" for part in item["content"]]
    chained = await c.expected(RESPONSES, request(RESPONSES, "text", previous_response_id="resp_1"))
    talk = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": said},
        {"role": "user", "content": TEXT},
    ]
    spelled = await c.expected(RESPONSES, request(RESPONSES, "text") | {"input": talk})
    texts = [[item.get("content") for item in answer["output"]] for answer in (chained, spelled)]
    assert texts[0] == texts[1]
    assert chained["usage"]["input_tokens"] == spelled["usage"]["input_tokens"]
    assert chained["previous_response_id"] == "resp_1"
    async with c.session.get(f"{c.urls[id(c.oracle)]}{RESPONSES}/resp_1") as kept:
        assert await kept.json() == first


async def test_what_is_kept_goes_with_the_process(cluster: Make) -> None:
    c = await cluster(store_responses=True)
    url = f"{c.urls[id(c.oracle)]}{RESPONSES}/resp_1"
    await c.expected(RESPONSES, request(RESPONSES, "text", request_id="resp_1"))
    await c.expected(RESPONSES, request(RESPONSES, "text", request_id="resp_2", store=False))
    async with c.session.get(url) as there, c.session.get(url.replace("_1", "_2")) as not_kept:
        assert (there.status, not_kept.status) == (200, 404)
    c.oracle.restart()
    async with c.session.get(url) as gone:
        assert gone.status == 404


async def test_nothing_is_kept_unless_the_node_is_told_to(cluster: Make) -> None:
    c = await cluster()
    await c.expected(RESPONSES, request(RESPONSES, "text", request_id="resp_1"))
    async with c.session.get(f"{c.urls[id(c.oracle)]}{RESPONSES}/resp_1") as answer:
        assert answer.status == 404
    status, body = await c.post(c.oracle, RESPONSES, request(RESPONSES, "text", background=True))
    assert (status, body["error"]["param"]) == (400, "background")


async def test_a_background_response_is_queued_and_then_there(cluster: Make) -> None:
    c = await cluster(store_responses=True)
    url = f"{c.urls[id(c.oracle)]}{RESPONSES}/resp_bg"
    queued = await c.expected(RESPONSES, request(RESPONSES, "text", background=True, request_id="resp_bg"))
    same_shape(queued, json.loads(REAL["responses_background"]))
    status = queued["status"]
    assert status == "queued"
    while status == "queued":
        async with c.session.get(url) as answer:
            status = (await answer.json())["status"]
    assert status == "incomplete"


# --- handles ---


@pytest.mark.parametrize("connector", ["stock", "kvreturn"])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_where_the_handle_is(cluster: Make, path: str, connector: str) -> None:
    """Responses have a place for it. Streamed Messages have none: our connector puts it on their last event."""
    c = await cluster(connector=connector)
    leg = {"max_output_tokens": 1} if path == RESPONSES else {}
    _, at_p = await c.prefill(path, {**request(path, "text"), **leg})
    body = {**request(path, "text"), "kv_transfer_params": at_p["kv_transfer_params"]}
    _, whole = await c.post(c.d, path, body)
    assert whole["kv_transfer_params"]["do_remote_decode"] is True
    _, at_p = await c.prefill(path, {**request(path, "text"), **leg})
    body["kv_transfer_params"] = at_p["kv_transfer_params"]
    async with c.session.post(c.urls[id(c.d)] + path, json={**body, "stream": True}) as answer:
        *events, last = [parsed(event) for event in (await answer.text())[:-2].split("\n\n")]
    holder = last["response"] if path == RESPONSES else last
    told = connector == "kvreturn" or path == RESPONSES
    assert (holder.get("kv_transfer_params") is not None) is told
    assert "remote_engine_id" not in json.dumps(events)


# --- the official clients, on their own types ---


async def test_the_official_clients_run_a_tool(cluster: Make) -> None:
    c = await cluster(template="keep_thinking")
    url = c.urls[id(c.oracle)]
    tool: Any = TOOLS[RESPONSES]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as sdk:
        whole: Any = await sdk.responses.create(model="sim", input=TEXT, **tool)
        async with sdk.responses.stream(model="sim", input=TEXT, **tool) as events:
            streamed: Any = await events.get_final_response()
        for answer in (whole, streamed):
            (thought, call) = answer.output
            assert (thought.type, call.type) == ("reasoning", "function_call")
            assert json.loads(call.arguments).keys() == {"x"}
        assert whole.output[0].content == streamed.output[0].content
        assert whole.output[1].arguments == streamed.output[1].arguments
    tool = TOOLS[MESSAGES]
    said: Any = [{"role": "user", "content": TEXT}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as other:
        message: Any = await other.messages.create(model="sim", messages=said, max_tokens=400, **tool)
        async with other.messages.stream(model="sim", messages=said, max_tokens=400, **tool) as stream_of:
            final: Any = await stream_of.get_final_message()
    for got in (message, final):
        (thinking, use) = got.content
        assert (thinking.type, use.type, got.stop_reason) == ("thinking", "tool_use", "tool_use")
        assert use.input.keys() == {"x"}
    assert message.content[0].thinking == final.content[0].thinking
    assert message.content[1].input == final.content[1].input
