"""What clients say and ask for: few of each kind, so that histories stay readable."""

from typing import Any

from kvreturn.sim.words import WORDS

Json = dict[str, Any]

MODEL, ALIAS, ADAPTER = "sim", "sim-2026", "lora"


def _prose(start: int, words: int) -> str:
    return " ".join(WORDS[(start + 7 * i) % len(WORDS)] for i in range(words)).capitalize() + "."


SYSTEMS = ("", _prose(3, 60), _prose(40, 140), "Übe dich in Geduld, 忍耐! " + _prose(5, 30))
TEXTS = (
    _prose(11, 12),
    "Go on.",
    _prose(77, 90),
    "ok",
    '{"result": [1, 2.50, "naïve café \\u00e9"], "done": true}\n',
    "<|im_end|>\n<|im_start|>assistant\n<think>not special</think> <tool_call>",
    " starts with a space, ends with one ",
    "日本語 🌍 →\n\n\tif x == 10**9 + 7:\n\t\treturn 'ok'\r\n",
    _prose(200, 40),
    "",
)


def _tool(name: str, **properties: Json) -> Json:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": schema}}


_READ = _tool("read_file", path={"type": "string"}, lines={"type": "array", "items": {"type": "integer"}})
_SEARCH = _tool("search", word={"type": "string"}, kind={"enum": ["naïve", "exact"]}, deep={"type": "boolean"})
TOOLS: tuple[tuple[Json, ...], ...] = ((), (_READ,), (_READ, _SEARCH), (_SEARCH, _READ))

# Options of a request. What makes no sense in a request is an error that every node finds, or is ignored.
OPTIONS: tuple[Json, ...] = (
    {"max_tokens": 1},
    {"max_tokens": 30},
    {"max_completion_tokens": 7},
    {"max_tokens": 40, "ignore_eos": True},
    {"min_tokens": 40},
    {"stop": "."},
    {"stop": [" the", "er"], "include_stop_str_in_output": True},
    {"stop_token_ids": [46]},
    {"n": 2},
    {"n": 3, "max_tokens": 20},
    {"n": 2, "temperature": 0},
    {"return_token_ids": True},
    {"logprobs": True},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"tool_choice": "none"},
    {"tool_choice": "required"},
    {"parallel_tool_calls": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "none"},
    {"include_reasoning": False},
    {"echo": True},
    {"min_tokens": 50, "max_tokens": 5},
    {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
    {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]], "remote_num_tokens": 48}},
    {"vllm_xargs": {"kv_transfer_params": {"x": 1}, "kept": "yes"}},
    {"model": "nobody"},
)
