"""What the KV of a vLLM request depends on, as the wire format wants it."""

import hashlib
from collections.abc import Sequence
from typing import Any

from kvreturn_connector import wire


class Prompts:
    """Digests of requests.

    Args:
        secret: shared by router and nodes, empty where none is configured.
        block_size: tokens per block.
    """

    def __init__(self, secret: bytes, block_size: int) -> None:
        self._secret = secret
        self.block_size = block_size

    def seed(self, request: Any) -> bytes:
        """See `wire.chain_seed`."""
        lora = request.lora_request.lora_name if request.lora_request else ""
        return wire.chain_seed(self._secret, lora=lora, cache_salt=request.cache_salt or "")

    def held(self, request: Any, blocks: Sequence[int]) -> tuple[int, list[int]]:
        """What a finished request surely holds.

        With asynchronous scheduling vLLM counts a token as computed when its step is scheduled: the last ones may be
        written at this moment, while a reader is already on its way. And with speculative decoding it has computed more
        tokens than it keeps when one of them ends the answer.

        Args:
            request: vLLM's.
            blocks: all that it has, of one KV cache group.

        Returns:
            Number of tokens, and the blocks that they are in.
        """
        held = min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens)
        return held, list(blocks[: -(-held // self.block_size)])

    def inputs(self, request: Any, tokens: int) -> dict[int, bytes] | None:
        """By block: what the first `tokens` tokens depend on besides LoRA and salt, by vLLM's own rule.

        That is multimodal inputs.
        """
        if not request.mm_features:
            return None
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys  # noqa: PLC0415 - rarely needed

        extra: dict[int, bytes] = {}
        index = 0
        for block, start in enumerate(range(0, tokens, self.block_size)):
            keys, index = generate_block_hash_extra_keys(request, start, start + self.block_size, index)
            ours = [
                key for key in keys or () if not (isinstance(key, tuple) and key[:1] in {("lora",), ("cache_salt",)})
            ]
            if ours:
                extra[block] = hashlib.sha256(repr(ours).encode()).digest()
        return extra

    def ids(self, request: Any) -> list[int] | None:
        """The prompt's token ids; None if its KV depends on more than these."""
        if request.mm_features or request.prompt_embeds is not None or request.prompt_token_ids is None:
            return None
        return list(request.prompt_token_ids)

    def digest(self, request: Any) -> str | None:
        """See `wire.prompt_digest`; None if it cannot be told."""
        tokens = request.prompt_token_ids
        if tokens is None or request.prompt_embeds is not None:
            return None
        inputs = [(f.identifier, f.mm_position.offset, f.mm_position.length) for f in request.mm_features or ()]
        return wire.prompt_digest(tokens, self.seed(request), repr(inputs).encode() if inputs else b"")
