"""Driving a turn by hand: handles as D gives them, a P that answers as told, a store without a clock."""

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvreturn.core import wire
from kvreturn.core.api import API, Chat
from kvreturn.core.capture import Capture, open_capture
from kvreturn.core.facts import Facts
from kvreturn.core.fingerprint import Scope
from kvreturn.core.handle import Handle
from kvreturn.core.outcome import Outcome
from kvreturn.core.policy import Policy
from kvreturn.core.ports import Ask, Effect, Failure, Forward, Put, Record, Refuse, Reply, Result, Take, Taken
from kvreturn.core.turn import Turn

Json = dict[str, Any]
SCOPE = Scope(b"key", b"tenant")
P1, P2, D1, D2 = "10.0.0.1:8000", "10.0.0.2:8000", "10.1.0.1:8000", "10.1.0.2:8000"
BLOCK = 16
COLD: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def compact(obj: object) -> bytes:
    """JSON without spaces, as vLLM writes it."""
    return json.dumps(obj, separators=(",", ":")).encode()


def d_handle(
    tokens: Sequence[int] | int = 160,
    *,
    proof: bool = True,
    secret: bytes = b"",
    ttl: float = 480.0,
    salt: str = "",
    **changes: Any,  # noqa: ANN401 - JSON
) -> Json:
    """`kv_transfer_params` of a vLLM 0.32.0 decode node.

    Args:
        tokens: what D holds, or how many.
        proof: whether our connector runs on D.
        secret: what it signs with.
        ttl: how long it says that D keeps the blocks.
        salt: the request's `cache_salt`.
        changes: other values for members; None leaves one out.
    """
    held = list(range(1, tokens + 1)) if isinstance(tokens, int) else list(tokens)
    handle: Json = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(1, -(-len(held) // BLOCK) + 1))],
        "remote_engine_id": "9b1f-d",
        "remote_request_id": "chatcmpl-1-0",
        "remote_host": "10.1.0.1",
        "remote_port": 5601,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(held),
        "remote_blocks_expiry_time": 4112.252977557,
        "transfer_mode": "pull",
    }
    if proof:
        seed = wire.chain_seed(secret, cache_salt=salt)
        digests = wire.block_digests(held, BLOCK, seed)
        handle["kvreturn"] = wire.dump_proof(wire.Proof(BLOCK, wire.scope_tag(seed), digests, (7,), ttl))
    handle = {k: v for k, v in (handle | changes).items() if v is not None}
    if proof and secret:
        handle["kvreturn"]["mac"] = base64.b64encode(wire.sign(secret, handle)).decode()
    return handle


def p_params(report: Json | None = None, **changes: Any) -> Json:  # noqa: ANN401 - JSON
    """`kv_transfer_params` of a vLLM 0.32.0 prefill node, with what our connector reports."""
    params: Json = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4]],
        "remote_engine_id": "51c0-p",
        "remote_request_id": "chatcmpl-1-1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 200,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    if report is not None:
        params["kvreturn"] = {"v": 1, "proven": 0, "read": 0, "local": 0} | report
    return params | changes


def p_reply(report: Json | None = None, *, prompt_tokens: int = 200, node: str = P1, **changes: Any) -> Reply:  # noqa: ANN401 - JSON
    """P's answer to the P leg."""
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": prompt_tokens + 1},
        "kv_transfer_params": p_params(report, **changes),
    }
    return Reply(node, 200, compact(body))


def p_error(status: int = 500, node: str | None = P1, body: bytes = b"{}") -> Reply:
    """P answers with an error."""
    return Reply(node, status, body)


def p_silent(failure: Failure, node: str | None = P1) -> Reply:
    """P does not answer."""
    return Reply(node, failure=failure)


def tokenized(tokens: Iterable[int], node: str = P1) -> Reply:
    """The answer of `/tokenize`."""
    ids = list(tokens)
    return Reply(node, 200, compact({"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None}))


def found(handle: Json | bytes | None, *, reason: Outcome | None = None, age: float = 3.5, node: str = D1) -> Taken:
    """The store's answer when it has a record."""
    raw = compact(handle) if isinstance(handle, dict) else handle
    return Taken(Record(450.0, raw, reason, node, P1), None, age)


@dataclass
class Judge:
    """Objects when told to, and remembers what it was told."""

    says: Outcome | None = None
    failed: list[str] = field(default_factory=list)
    succeeded: list[str] = field(default_factory=list)
    prefills: list[tuple[str, str, bool]] = field(default_factory=list)
    decodes: list[tuple[str, str]] = field(default_factory=list)

    def objection(self, record: Record, handle: Handle, age: float | None = None) -> Outcome | None:
        """See `kvreturn.core.ports.Judge`."""
        del age
        assert record.handle == handle.raw
        return self.says

    def read_failed(self, handle: Handle, *, hung: bool = False) -> None:
        del hung
        """See `kvreturn.core.ports.Judge`."""
        self.failed.append(handle.engine)

    def prefilled(self, node: str, engine: str, *, proves: bool) -> None:
        """See `kvreturn.core.ports.Judge`."""
        self.prefills.append((node, engine, proves))

    def decoded(self, node: str, engine: str) -> str:
        """See `kvreturn.core.ports.Judge`."""
        self.decodes.append((node, engine))
        return node

    def read_succeeded(self, handle: Handle) -> None:
        """See `kvreturn.core.ports.Judge`."""
        self.succeeded.append(handle.engine)


@dataclass
class Drive:
    """One turn, and all that it asked and decided.

    Args:
        body: the client's request.
        results: what the world answers to the turn's effects, in order.
        policy: as the settings would have it.
        api: of the path.
        judge: what is known of nodes.
        scope: whose request it is.
    """

    body: Json | bytes
    results: Sequence[Result] = (Taken(), p_reply())
    policy: Policy = field(default_factory=lambda: Policy(proof="connector"))
    api: API = field(default_factory=Chat)
    judge: Judge = field(default_factory=Judge)
    scope: Scope = SCOPE

    @cached_property
    def _run(self) -> tuple[Turn, list[Effect], Forward | Refuse]:
        """The request side, run to its decision when somebody first looks."""
        turn, effects, waiting = Turn(self.api, self.scope, lambda _: self.policy, self.judge), [], list(self.results)
        steps = turn.request(self.body if isinstance(self.body, bytes) else compact(self.body))
        try:
            effect = next(steps)
            while True:
                effects.append(effect)
                assert waiting, f"nobody said what to answer to {effect!r}"
                effect = steps.send(waiting.pop(0))
        except StopIteration as stop:
            assert not waiting, f"was not asked for: {waiting!r}"
            return turn, effects, stop.value

    @property
    def turn(self) -> Turn:
        """The turn, its request side done."""
        return self._run[0]

    @property
    def facts(self) -> Facts:
        """What happened in it."""
        return self.turn.facts

    @property
    def effects(self) -> list[Effect]:
        """What it asked of the world."""
        return self._run[1]

    @property
    def decision(self) -> Forward | Refuse:
        """What it decided."""
        return self._run[2]

    @property
    def asks(self) -> list[Ask]:
        """The requests to prefill nodes."""
        return [e for e in self.effects if isinstance(e, Ask)]

    @property
    def keys(self) -> list[bytes]:
        """Where it looked for its predecessor."""
        (take,) = [e for e in self.effects if isinstance(e, Take)]
        return list(take.keys)

    @property
    def p_bodies(self) -> list[Json]:
        """The bodies of the P leg."""
        return [json.loads(ask.body) for ask in self.asks if ask.path != "/tokenize"]

    @property
    def carried(self) -> list[Json]:
        """The `kv_transfer_params` of the P leg."""
        return [body["kv_transfer_params"] for body in self.p_bodies]

    @property
    def d_body(self) -> Json:
        """The body that D gets."""
        assert isinstance(self.decision, Forward)
        body: Json = json.loads(self.decision.body)
        return body

    def respond(
        self, *pieces: bytes | Json, stream: bool = False, node: str | None = D1, end: bool = True
    ) -> tuple[Put | None, bytes, Capture]:
        """Let D answer, as the server does it: settle when the handle has passed, and at the end.

        Returns:
            What is to be stored, what the client got, and the capture.
        """
        kind = "text/event-stream; charset=utf-8" if stream else "application/json"
        capture = open_capture(
            kind, self.turn.answer, event_bytes=1 << 20, response_bytes=1 << 20, ids=self.turn.ids_in_answer
        )
        put, out = None, b""
        for piece in pieces:
            out += capture.decode(compact(piece) if isinstance(piece, dict) else piece)
            if capture.handle:
                put = put or self.turn.settle(capture, node)
        if end:
            out += capture.flush()
            put = put or self.turn.settle(capture, node)
        return put, out, capture


def request(*contents: str, **more: Any) -> Json:  # noqa: ANN401 - JSON
    """A chat request; messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return {"model": "m", "messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)], **more}


def answered(content: str | None = "Hi", handle: Json | None = None, **message: Any) -> Json:  # noqa: ANN401 - JSON
    """D's answer to a chat request, not streamed."""
    reply: Json = {
        "id": "chatcmpl-2",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, **message},
                "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
            }
        ],
        "usage": {"prompt_tokens": 200, "completion_tokens": 5, "total_tokens": 205},
    }
    return reply | ({"kv_transfer_params": handle} if handle is not None else {})
