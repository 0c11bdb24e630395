"""D's streams for `/v1/responses` and `/v1/messages`, as vLLM 0.32.0 makes them, and where the handle is in each."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

JSON = Mapping[str, Any]


def event(body: JSON) -> bytes:
    """One event; its name is its type."""
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), json.dumps(body, separators=(",", ":")).encode())


def response_object(
    text: str | None = None, *, params: JSON | None = None, name: str = "resp_1", **more: object
) -> dict[str, Any]:
    """The response, with one message of this text once it is complete."""
    output: list[Any] = []
    usage: Any = None
    if text is not None:
        part: JSON = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
        output = [{"id": "msg_1", "content": [part], "role": "assistant", "status": "completed", "type": "message"}]
        usage = {
            "input_tokens": 114,
            "input_tokens_details": {"cached_tokens": 96},
            "output_tokens": 4,
            "total_tokens": 118,
        }
    return {
        "id": name,
        "created_at": 1795963698,
        "model": "m",
        "object": "response",
        "output": output,
        "status": "in_progress" if text is None else "completed",
        "usage": usage,
        "kv_transfer_params": params,
        "ec_transfer_params": None,
        **more,
    }


def response_events(text: str = "Good morning", *, params: JSON | None = None, name: str = "resp_1") -> list[bytes]:
    """A whole stream; the handle is inside the response of its last event."""
    begun = response_object(name=name)
    deltas = [{"type": "response.output_text.delta", "delta": d, "item_id": "msg_1"} for d in (text[:4], text[4:])]
    bodies: Sequence[JSON] = (
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        *deltas,
        {"type": "response.completed", "response": response_object(text, params=params, name=name)},
    )
    return [event({**body, "sequence_number": i}) for i, body in enumerate(bodies)]


def message_events(text: str = "Good morning", *, params: JSON | None = None, **usage: int) -> list[bytes]:
    """A whole stream; our connector puts the handle on its last event."""
    message: JSON = {
        "id": "chatcmpl-d",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "m",
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 114, "output_tokens": 0},
    }
    deltas = [{"type": "text_delta", "text": t} for t in (text[:4], text[4:])]
    last = {"input_tokens": 18, "output_tokens": 4, "cache_read_input_tokens": 96, **usage}
    bodies: Sequence[JSON] = (
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0},
        *({"type": "content_block_delta", "delta": d, "index": 0} for d in deltas),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": last},
        {"type": "message_stop"} | ({} if params is None else {"kv_transfer_params": params}),
    )
    return [event(body) for body in bodies]


def without_params(text: bytes) -> bytes:
    """A stream or body of these as a client may see it: no such member, null ones included."""
    for member in (b',"kv_transfer_params":null', b',"ec_transfer_params":null'):
        text = text.replace(member, b"")
    return text
