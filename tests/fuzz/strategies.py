"""What the fuzz targets are fed with: JSON of the APIs' words in the wrong places, and bytes cut anywhere."""

import json
import os
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from kvreturn.core.capture import HIDDEN
from kvreturn.core.handle import PARAMS
from kvreturn.core.ports import Failure, Reply
from support.turns import P1, compact, p_params

bounded = settings(max_examples=int(os.environ.get("KVRETURN_FUZZ_EXAMPLES", "25")))
"""How long a target runs by default. `make fuzz` runs it for a time instead, guided by coverage."""

SECRET = "10.66.66.66"
"""Stands in every handle; must be in nothing that a client gets."""

HANDLE: dict[str, Any] = {
    "remote_host": SECRET,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": SECRET,
    "nested": {"text": f'}}{{"\\{SECRET}'},
}

WORDS = (
    *("role", "content", "type", "text", "refusal", "reasoning", "tool_calls", "function", "name", "arguments", "id"),
    *("input", "output", "call_id", "tool_use_id", "thinking", "partial_json", "index", "delta", "choices", "message"),
    *("response", "usage", "finish_reason", "stop_reason", "status", "error", "code", "content_block", "citations"),
    *(
        "cache_control",
        "prompt_tokens",
        "prompt_tokens_details",
        "cached_tokens",
        "input_tokens",
        "summary",
        "namespace",
    ),
)
VALUES = (
    *("user", "assistant", "system", "tool", "function_call", "function_call_output", "custom_tool_call", "reasoning"),
    *(
        "text",
        "input_text",
        "output_text",
        "tool_use",
        "tool_result",
        "text_delta",
        "input_json_delta",
        "thinking_delta",
    ),
    *(
        "message_start",
        "message_delta",
        "completed",
        "incomplete",
        "failed",
        "stop",
        '{"a": 1}',
        '{"a"',
        "",
        "\ud800",
        "\0",
    ),
)
NUMBERS = st.integers(-2, 300) | st.sampled_from([2**31, 2**53 + 1, 2**64, 10**400]) | st.floats()
_leaves = st.none() | st.booleans() | NUMBERS | st.sampled_from(VALUES) | st.text(max_size=8)
names = st.sampled_from(WORDS) | st.text(max_size=4)
values = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5), max_leaves=12
)
objects = st.dictionaries(names, values, max_size=6)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={word: values | st.lists(objects, max_size=3) for word in ("role", "content", "type", "tool_calls")},
    ),
    min_size=1,
    max_size=4,
)
cuts = st.lists(st.integers(0, 1 << 12), max_size=8)
_spacing = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t"), ("\r\n,", ":")])


@st.composite
def texts(draw: st.DrawFn, of: st.SearchStrategy[Any] = values) -> bytes:
    """A JSON text, in ASCII or not, with some white space."""
    value, spacing, ascii_only = draw(of), draw(_spacing), draw(st.booleans())
    text = json.dumps(value, separators=spacing, ensure_ascii=ascii_only)
    return text.encode(errors="surrogatepass")


@st.composite
def nested(draw: st.DrawFn) -> bytes:
    """A JSON text of great depth, about where parsers give up too."""
    depth = draw(st.integers(1, 60) | st.integers(850, 1100) | st.just(100_000))
    opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"a":', b"}"), (b'[{"content":', b"}]")]))
    return opening * depth + b"1" + closing * depth


@st.composite
def holding(draw: st.DrawFn) -> bytes:
    """A JSON object with a handle in it, at any of the places where the APIs have it."""
    obj, place = draw(objects), draw(st.sampled_from([None, "response", "message"]))
    inner = {**draw(objects), draw(st.sampled_from(HIDDEN)): HANDLE}
    items = list(({**obj, place: inner} if place else {**obj, **inner}).items())
    text = json.dumps(dict(draw(st.permutations(items))), separators=draw(st.sampled_from([(",", ":"), (", ", ": ")])))
    return text.encode()


# --- of the APIs ---

prompts = messages | values | st.lists(objects, max_size=3) | st.lists(st.integers(0, 70), max_size=200)
members = (
    "system",
    "instructions",
    "tools",
    "n",
    "stream",
    "cache_salt",
    "echo",
    "continue_final_message",
    "background",
)
requests = st.fixed_dictionaries(
    {"model": st.just("m") | values, "messages": prompts, "prompt": prompts | st.text(max_size=600), "input": prompts},
    optional=dict.fromkeys(members, values),
)

kinds = st.sampled_from(
    [
        *(
            "message_start",
            "message_delta",
            "content_block_start",
            "content_block_delta",
            "message_stop",
            "ping",
            "error",
        ),
        *("response.created", "response.completed", "response.output_text.delta"),
    ]
)
choices = st.lists(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("index", "delta", "message", "text", "finish_reason"), values | objects)
    ),
    max_size=3,
)
chunks = st.one_of(
    st.builds(lambda kind, more: {**more, "type": kind}, kinds, objects),
    st.builds(lambda some, more: {**more, "choices": some}, choices, objects),
    objects,
)

odd_params = st.builds(
    lambda changes: p_params() | changes, st.dictionaries(st.sampled_from(list(p_params())), values, max_size=3)
)
reports = st.fixed_dictionaries(
    {"v": st.just(1) | values},
    optional=dict.fromkeys(("proven", "read", "local", "reason", "ids", "expires", "prompt"), NUMBERS | values),
)
usages = st.dictionaries(st.sampled_from([w for w in WORDS if "token" in w]), NUMBERS | values, max_size=4)


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    """P's answer: an error, rubbish, or a body with something odd in it."""
    if draw(st.booleans()):
        params = draw(odd_params | values)
        if isinstance(params, dict) and draw(st.booleans()):
            params["kvreturn"] = draw(reports)
        body = {"choices": draw(choices), "usage": draw(usages), PARAMS: params, "tokens": draw(prompts)}
        return Reply(P1, 200, compact(body))
    if draw(st.booleans()):
        return Reply(
            P1, draw(st.sampled_from([200, 400, 404, 499, 500, 503, 529])), draw(texts() | st.binary(max_size=30))
        )
    return Reply(draw(st.sampled_from([P1, None])), failure=draw(st.sampled_from(Failure)))
