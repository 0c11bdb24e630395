"""Settings of a simulated node."""

from dataclasses import dataclass, field, replace
from typing import Literal

from kvreturn.sim.template import TEMPLATES
from kvreturn.sim.tokenizer import Kind

Role = Literal["prefill", "decode", "single"]
ConnectorKind = Literal["stock", "kvreturn"]


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things take; a rate of 0 means no time at all.

    The rates are those of an 8B model on one data-centre GPU, rounded; the seconds were measured on vLLM.

    Attributes:
        prefill_rate: prompt tokens computed per second; one prompt at a time.
        decode_rate: tokens per second of one stream; streams do not slow each other down.
        transfer_rate: bytes per second between two nodes.
        bytes_per_token: size of one token's KV (32 layers, 8 KV heads of 128, fp16, K and V).
        overhead: seconds per request for everything else.
        unreachable: seconds until a handshake with nobody fails.
        mismatch: seconds until a handshake with the wrong engine fails.
        failed_read: seconds until a read from a known engine that is gone fails.
    """

    prefill_rate: float = 8_000.0
    decode_rate: float = 60.0
    transfer_rate: float = 10e9
    bytes_per_token: int = 131_072
    overhead: float = 0.005
    unreachable: float = 5.0
    mismatch: float = 0.3
    failed_read: float = 0.015

    def prefill(self, tokens: int) -> float:
        """Seconds to compute `tokens` prompt tokens."""
        return self.overhead + (tokens / self.prefill_rate if self.prefill_rate else 0.0)

    def decode(self) -> float:
        """Seconds per generated token."""
        return 1.0 / self.decode_rate if self.decode_rate else 0.0

    def transfer(self, tokens: int) -> float:
        """Seconds to move the KV of `tokens`."""
        return tokens * self.bytes_per_token / self.transfer_rate if self.transfer_rate else 0.0


INSTANT = Timing(prefill_rate=0.0, decode_rate=0.0, transfer_rate=0.0, overhead=0.0)
"""Work takes no time; failures take theirs."""

NO_TIMING = replace(INSTANT, unreachable=0.0, mismatch=0.0, failed_read=0.0)
"""Nothing takes time."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node. Defaults are vLLM 0.32.0's, but what kvreturn needs is on: `bidirectional`, the parsers, cache usage.

    Attributes:
        role: `prefill` and `decode` have a KV connector; `single` has none. The two differ in nothing else: as in
            vLLM, what a request's `kv_transfer_params` say decides.
        connector: vLLM's own NixlConnector, or kvreturn's plugin on top of it.
        model: name of the base model.
        aliases: further names of the base model (vLLM's `--served-model-name` takes several).
        adapters: names of LoRA adapters, served as further models.
        template: one of `TEMPLATES`.
        tokenizer: `exact`: generated text encodes back to the generated tokens. `blurry`: not always.
        block_size: tokens per KV block.
        num_blocks: KV blocks, the null block included.
        max_model_len: longest sequence in tokens; must fit into the blocks.
        prefix_caching: vLLM's `--enable-prefix-caching`.
        tool_parser: vLLM's `--enable-auto-tool-choice --tool-call-parser`; without it tools with `tool_choice` `auto`
            or `required` are refused.
        prompt_tokens_details: vLLM's `--enable-prompt-tokens-details`.
        store_responses: vLLM's `VLLM_ENABLE_RESPONSES_API_STORE`.
        bidirectional: vLLM's `bidirectional_kv_xfer`.
        load_failure_policy: vLLM's `kv_load_failure_policy`.
        recompute_threshold: vLLM's `kv_recompute_threshold`, tokens.
        lease: vLLM's `kv_lease_duration`, seconds for which P keeps blocks for D.
        scheduling_policy: vLLM's `--scheduling-policy`: `priority` heeds the requests' `priority`.
        decoder_ttl: vLLM's `decoder_kv_blocks_ttl`, seconds for which D keeps blocks for P.
        side_host: what handles name as `remote_host` (vLLM's `VLLM_NIXL_SIDE_CHANNEL_HOST`).
        side_port: side channel port, of rank 0 if there are several; 0 takes a free one.
        data_parallel_size: engines behind one API server (vLLM's `--data-parallel-size`).
        retention_budget: share of the blocks that D's pins may keep with kvreturn's connector, 0 to 1.
        secret: for the digests and MACs of kvreturn handles; empty for none.
        allowed_peers: hosts that kvreturn's connector may contact; None for all.
        timing: how long things take.
        keep_requests: how many requests `SimNode.requests` remembers.
    """

    role: Role = "single"
    connector: ConnectorKind = "stock"
    model: str = "sim"
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    template: str = "plain"
    tokenizer: Kind = "exact"
    block_size: int = 16
    num_blocks: int = 8_193
    max_model_len: int = 65_536
    prefix_caching: bool = True
    tool_parser: bool = True
    prompt_tokens_details: bool = True
    store_responses: bool = False
    bidirectional: bool = True
    load_failure_policy: Literal["fail", "recompute"] = "fail"
    recompute_threshold: int = 64
    lease: float = 30.0
    decoder_ttl: float = 480.0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    retention_budget: float = 0.5
    side_host: str = "localhost"
    side_port: int = 0
    data_parallel_size: int = 1
    secret: bytes = field(default=b"", repr=False)
    allowed_peers: tuple[str, ...] | None = None
    timing: Timing = Timing()
    keep_requests: int = 256

    def __post_init__(self) -> None:
        """Refuse what could never work.

        Raises:
            ValueError: says which setting to change.
        """
        if self.template not in TEMPLATES:
            raise ValueError(f"template {self.template!r} is none of {', '.join(TEMPLATES)}")
        if self.data_parallel_size < 1:
            raise ValueError("data_parallel_size must be positive")
        if self.block_size < 1 or self.max_model_len < 1:
            raise ValueError("block_size and max_model_len must be positive")
        if not 0.0 <= self.retention_budget <= 1.0:
            raise ValueError("retention_budget is a share of the KV cache: a number from 0 to 1")
        if (self.num_blocks - 1) * self.block_size < self.max_model_len:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit into {self.num_blocks} blocks of {self.block_size} "
                "tokens (one of them is the null block): raise num_blocks or lower max_model_len"
            )
