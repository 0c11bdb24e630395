"""A P and a D that know tokens and no KV: what they hold is compared with what is read, token by token.

P reads all that it can from D, as if it had no prefix cache; what one would have had is told beside it.
"""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from kvreturn.core import wire
from kvreturn.core.ports import Ask, Reply
from replay.rendering import Json, Template, messages_of
from support.turns import BLOCK, D1, P1, compact, d_handle, p_reply, tokenized

THRESHOLD = 64  # vLLM's `kv_recompute_threshold`: a read of fewer tokens is not worth it


@dataclass
class Nodes:
    """P and D.

    Args:
        template: their chat template.
        tokenizer: their tokenizer.
        stock: whether P is one without our connector.
        rng: where a model's tokens are not those that its text encodes to; None if they always are.

    Attributes:
        held: the tokens whose KV D holds, by request id.
        read: how many tokens P read in the latest prefill.
        prompts: all that P has seen.
    """

    template: Template
    tokenizer: Tokenizer
    stock: bool = False
    rng: random.Random | None = None
    held: dict[str, list[int]] = field(default_factory=dict)
    read: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    _names: "itertools.count[int]" = field(default_factory=itertools.count)
    _known: dict[str, list[int]] = field(default_factory=dict)

    def tokens(self, path: str, body: Json) -> list[int]:
        """A request's prompt."""
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return list(prompt)
        return self._encoded(prompt if prompt is not None else self.template.render(*messages_of(path, body)))

    def reusable(self, prompt: Sequence[int]) -> dict[str, int]:
        """What of the prompt could be read, by the id of the request whose blocks D holds: whole blocks, or all."""
        found = {}
        for name, held in self.held.items():
            same = shared(held, prompt)
            found[name] = same if same == len(held) else same - same % BLOCK
        return {name: tokens for name, tokens in found.items() if tokens >= THRESHOLD}

    def cached(self, prompt: Sequence[int]) -> int:
        """What of the prompt a P with a large prefix cache would have itself: whole blocks."""
        same = max((shared(seen, prompt) for seen in self.prompts), default=0)
        return same - same % BLOCK

    def prefill(self, ask: Ask) -> Reply:
        """P's answer. Reads nothing that is not the prompt's, or the test fails."""
        body = json.loads(ask.body)
        if ask.path == "/tokenize":
            return tokenized(self.tokens("/v1/chat/completions", body), P1)
        prompt, params = self.tokens(ask.path, body), body["kv_transfer_params"]
        sealed = params.get("kvreturn", {}).get("handle")
        assert not (sealed and self.stock), "sealed for a stock P"
        handle = sealed or (params if params["remote_block_ids"] else None)
        self.prompts.append(prompt)
        self.read, report = 0, {}
        if handle:
            held = self.held.pop(handle["remote_request_id"], None)
            assert held is not None, "a handle was used twice"
            if sealed:
                proven = _proven(handle, prompt)
                self.read = proven if proven >= THRESHOLD else 0
                reason = None if self.read else "below_threshold" if proven else "not_a_continuation"
                report = {"proven": proven, "read": self.read, "reason": reason}
            else:  # as a stock P does it: by position and count
                blocks = handle["remote_block_ids"][0]
                assert blocks == list(range(1, len(blocks) + 1)), "not the first blocks"
                assert len(blocks) == -(-handle["remote_num_tokens"] // BLOCK), "more blocks than tokens, or fewer"
                self.read = min(handle["remote_num_tokens"], len(prompt))
            assert self.read <= shared(held, prompt), f"{self.read} tokens were read that are not all the prompt's"
        return p_reply(None if self.stock else report, prompt_tokens=len(prompt))

    def decode(self, path: str, body: Json, written: str) -> Json:
        """D's handle after it wrote this text. The KV of the last token is not computed."""
        params, prompt = body["kv_transfer_params"], self.tokens(path, body)
        assert params["do_remote_prefill"]
        assert params.get("prompt_token_ids", prompt) == prompt, "D got another prompt's tokens from P"
        name = f"chatcmpl-{next(self._names)}"
        self.held[name] = held = (prompt + self._generated(written))[:-1]
        return d_handle(held, remote_request_id=name, remote_host=D1.partition(":")[0])

    def _generated(self, text: str) -> list[int]:
        if self.rng is None:
            return self._encoded(text)
        at = self.rng.randrange(len(text) + 1)
        return self._encoded(text[:at]) + self._encoded(text[at:])

    def _encoded(self, text: str) -> list[int]:
        if text not in self._known:
            self._known = {text: self.tokenizer.encode(text).ids}  # P, D and the comparison encode each prompt
        return self._known[text]


def shared(held: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt)))


def _proven(handle: Json, prompt: Sequence[int]) -> int:
    """What our connector proves."""
    proof = wire.load_proof(handle["kvreturn"])
    return wire.proven_tokens(proof, handle["remote_num_tokens"], prompt, wire.chain_seed(b""))


def with_handle(answer: bytes, handle: Json, *, stream: bool) -> bytes:
    """D's answer with the handle where our connector puts it: first in the object, so that nothing else moves."""
    member = b'"kv_transfer_params":' + compact(handle) + b","
    start = 0
    if stream:
        marks = (b'"finish_reason":"', b'"type":"message_stop"', b'"type":"response.completed"')
        mark = next(m for m in marks if m in answer)
        start = answer.rindex(b"\ndata:", 0, answer.index(mark))
        if mark == marks[2]:
            start = answer.index(b'"response":', start)
    at = answer.index(b"{", start) + 1
    return answer[:at] + member + answer[at:]
