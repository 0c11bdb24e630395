"""The scheduler's side of the connector: what is pinned on D, what is proven and read on P."""

import hashlib
import logging
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvreturn_connector import wire
from kvreturn_connector.handles import REMOTE, Offer, check_blocks, check_peer, open_offer, prove
from kvreturn_connector.pins import PinTable, ticket
from kvreturn_connector.settings import Settings
from kvreturn_connector.sidechannel import Asker, listen

logger = logging.getLogger("vllm.kvreturn")
RELEASED = "kvreturn_released"  # attribute of the metadata that goes to the workers


@dataclass
class _Read:
    """What becomes of a handle on P, from the request's arrival to its end."""

    offer: Offer | None = None
    reason: str | None = None
    claim: "Future[str] | None" = None
    decided: bool = False
    local: int = 0
    read: int = 0


class ProvenPullScheduler(NixlPullConnectorScheduler):
    """vLLM's scheduler side of NIXL, with proof before reads and a budget for pins.

    Args:
        vllm_config: vLLM's.
        engine_id: vLLM's.
        kv_cache_config: vLLM's.
        settings: ours.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any, settings: Settings) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.settings = settings
        budget = int(kv_cache_config.num_blocks * settings.retention_budget)
        self.pins = PinTable(budget, settings.ttl, time.perf_counter)
        self._asker = Asker(settings.claim_timeout)
        self._reads: dict[str, _Read] = {}
        self._mismatched: set[str] = set()  # D's requests whose prompt is not the one that P computed
        self._warned: set[str] = set()

    # --- arrival ---

    def on_new_request(self, request: Any) -> None:
        """Check what came as `kv_transfer_params` before anything acts on it."""
        params = request.kv_transfer_params
        if params is not None:
            request.kv_transfer_params = self._admitted(request, params)
        super().on_new_request(request)

    def _admitted(self, request: Any, params: Any) -> dict[str, Any] | None:
        if not isinstance(params, MutableMapping):
            self._warn("params", "kv_transfer_params is no object: ignored")
            return None
        if params.get("do_remote_prefill"):
            return self._admitted_to_read_whole(request, params)
        if params.get("do_remote_decode"):
            if self.vllm_config.kv_transfer_config.kv_role == "kv_consumer":
                self._warn("role", "a prefill request came to a decode node: its kv_transfer_params are ignored")
                return None
            return self._admitted_to_prefill(request, params)
        # Neither direction: vLLM would compute, and pin the blocks for the whole TTL when it is done.
        self._warn("direction", "kv_transfer_params without a direction: ignored")
        return None

    def _admitted_to_read_whole(self, request: Any, params: MutableMapping[str, Any]) -> dict[str, Any] | None:
        """D's usual request, with P's handle: vLLM pulls the whole prompt."""
        try:
            check_peer(params, self.settings)
            check_blocks(params)
        except wire.WireError as e:
            self._warn(e.reason, f"prefill handle refused ({e}): computing")
            return None
        member = params.get(wire.MEMBER)
        theirs = member.get("prompt") if isinstance(member, Mapping) else None
        if theirs is not None and theirs != self._prompt_digest(request):
            self._warn("prompt", "the prefill node computed another prompt than ours (template? tokenizer?): computing")
            self._mismatched.add(request.request_id)
        return dict(params)

    def _admitted_to_prefill(self, request: Any, params: MutableMapping[str, Any]) -> dict[str, Any]:
        """P's request, perhaps with D's handle. What remains is cold; the handle is kept aside until it is decided."""
        read = self._reads[request.request_id] = _Read()
        handle = open_offer(params)
        if handle is not None:
            if not self.is_bidirectional_kv_xfer_enabled:
                self._warn("off", "a handle came, but bidirectional_kv_xfer is off here: set it on both sides")
                read.reason = "disabled"
            else:
                self._prove(request, handle, read)
        dropped = {*REMOTE, wire.MEMBER, "remote_num_tokens", "remote_blocks_expiry_time"}
        cold = {key: value for key, value in params.items() if key not in dropped}
        return cold | dict.fromkeys(REMOTE)

    def _prove(self, request: Any, handle: Mapping[str, Any], read: _Read) -> None:
        tokens = request.prompt_token_ids
        if tokens is None or request.prompt_embeds is not None:
            read.reason = "malformed"
            return
        try:
            read.offer = prove(
                handle, tokens, self.block_size, self.settings, self._seed(request), self._extra(request, len(tokens))
            )
        except wire.WireError as e:
            self._warn(e.reason, f"handle not used ({e}): computing")
            read.reason = e.reason
            return
        if not read.offer.proven:
            read.decided, read.reason = True, "not_a_continuation"
            self._let_go(read)

    # --- scheduling on P ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens to read beyond what is here. None while D is being asked whether it still holds them."""
        if request.request_id in self._mismatched:
            return 0, False
        read = self._reads.get(request.request_id)
        if read is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        params = request.kv_transfer_params
        if params.get("_remote_blocks_processed"):
            # One load per request. After a failed one, vLLM asks again and would wait for a load that nobody starts.
            read.local = num_computed_tokens
            return 0, False
        if read.offer is None or (read.decided and read.read == 0):
            read.local = max(read.local, num_computed_tokens)
            return 0, False
        read.local = num_computed_tokens
        wanted = min(read.offer.proven, request.num_prompt_tokens) - num_computed_tokens
        if wanted <= 0 or wanted < self.settings.threshold:
            read.decided, read.read = True, 0
            read.reason = "local_hit" if wanted <= 0 else "below_threshold"
            self._let_go(read)
            return 0, False
        if not read.decided:
            if read.claim is None:
                offer = read.offer
                read.claim = self._asker.claim(offer.address, offer.request_id, offer.ticket)
            if not read.claim.done():
                return None, False
            read.decided, read.reason = True, read.claim.result() or None
            if read.reason:
                return 0, False
            params.update(read.offer.remote_fields())
        read.read = wanted
        return wanted, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """VLLM has room for the request: start the load, if there is one."""
        read = self._reads.get(request.request_id)
        params = request.kv_transfer_params
        if read is not None and num_external_tokens == 0 and not params.get("_remote_blocks_processed"):
            if read.decided and params.get("remote_block_ids"):
                read.read, read.reason = 0, "local_hit"  # vLLM declined the load: prompt log probabilities, for example
                self._let_go(read)
            params.update(dict.fromkeys(REMOTE))
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers' news: loads that failed, pins that are over."""
        super().update_connector_output(connector_output)
        for request_id in connector_output.failed_recving or ():
            read = self._reads.get(request_id)
            if read is not None:
                read.read, read.reason = 0, "read_failed"
        for request_id in connector_output.finished_sending or ():
            self.pins.freed(request_id)

    def build_connector_meta(self, scheduler_output: Any) -> NixlConnectorMetadata:
        """VLLM's message to the workers, and our orders for pins with it."""
        orders = self.pins.take_orders()
        # A pin that was released before the workers heard of it must still reach them, or they would keep it.
        for request_id, until in orders.extend.items():
            self._reqs_need_send[request_id] = until
        meta = super().build_connector_meta(scheduler_output)
        setattr(meta, RELEASED, orders.release)
        return meta

    # --- the end of a request ---

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Pin the blocks or not, and say so in the response's `kv_transfer_params`."""
        params = request.kv_transfer_params
        read = self._reads.pop(request.request_id, None)
        self._mismatched.discard(request.request_id)
        if read is not None:
            self._abandon(read, params)
        delay, out = super().request_finished(request, block_ids)
        if out is None:
            return delay, out
        if read is not None:
            out[wire.MEMBER] = self._report(request, read)
            return delay, out
        return self._returned(request, params, out, delay=delay)

    def _report(self, request: Any, read: _Read) -> dict[str, Any]:
        proven = read.offer.proven if read.offer else 0
        report = wire.Report(proven, read.read, read.local, read.reason, self._prompt_digest(request))
        return wire.dump_report(report)

    def _returned(
        self, request: Any, params: Mapping[str, Any], out: dict[str, Any], *, delay: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """D's handle, if the turn may leave one."""
        keep = self._worth_keeping(params, out)
        if keep:
            blocks, held = out["remote_block_ids"][0], out["remote_num_tokens"]
            digests = wire.block_digests(
                request.all_token_ids[:held], self.block_size, self._seed(request), self._extra(request, held)
            )
            mark = ticket(self.engine_id, request.request_id, blocks, held, digests)
            reader_asks = isinstance(params.get(wire.MEMBER), Mapping)  # P runs our connector: its report came along
            keep = self.pins.pin(request.request_id, blocks, mark, releasable=reader_asks)
        if not keep:
            if delay:
                self._reqs_need_send.pop(request.request_id, None)
                self._reqs_not_processed.add(request.request_id)
            return False, None
        out["remote_block_ids"] = [list(blocks)]
        proof = wire.Proof(
            self.block_size,
            wire.scope_tag(self._seed(request)),
            digests,
            tuple(request.output_token_ids),
            self.settings.ttl,
        )
        out[wire.MEMBER] = wire.dump_proof(proof)
        if self.settings.secret:
            mac = wire.sign(self.settings.secret, out)
            out[wire.MEMBER] = wire.dump_proof(
                wire.Proof(proof.block_size, proof.scope, proof.digests, proof.generated, proof.ttl, mac)
            )
        return True, out

    def _worth_keeping(self, params: Mapping[str, Any], out: Mapping[str, Any]) -> bool:
        member = params.get(wire.MEMBER)
        if isinstance(member, Mapping) and member.get("keep") is False:
            return False  # the router says that it will not come back for it
        if not params.get("_remote_blocks_processed") or not params.get("remote_request_id"):
            return False  # no prefill node was part of this: nobody knows of the blocks
        if len(out["remote_block_ids"]) != 1:
            self._warn("groups", "several KV cache groups cannot be proven: turns of this model leave no handle")
            return False
        return bool(out["remote_block_ids"][0]) and out["remote_num_tokens"] > 0

    def _abandon(self, read: _Read, params: Mapping[str, Any] | None) -> None:
        """A request ended before its handle was decided or loaded: D need not wait."""
        if read.offer and not (params or {}).get("_remote_blocks_processed") and read.reason is None:
            self._let_go(read)

    def _let_go(self, read: _Read) -> None:
        if read.offer:
            self._asker.release(read.offer.address, read.offer.request_id, read.offer.ticket)

    def shutdown(self) -> None:
        """Stop threads."""
        self._asker.close()
        super().shutdown()

    # --- the side channel ---

    def _nixl_handshake_listener(
        self,
        encoded_data: Mapping[tuple[int, int], bytes],
        ready_event: threading.Event,
        stop_event: threading.Event,
        host: str,
        port: int,
    ) -> None:
        """In place of vLLM's listener, which the base class starts in a thread."""
        listen(
            host, port, metadata=encoded_data, get_meta=GET_META_MSG, pins=self.pins, ready=ready_event, stop=stop_event
        )

    # --- digests ---

    def _seed(self, request: Any) -> bytes:
        lora = request.lora_request.lora_name if request.lora_request else ""
        return wire.chain_seed(self.settings.secret, lora=lora, cache_salt=request.cache_salt or "")

    def _extra(self, request: Any, tokens: int) -> dict[int, bytes] | None:
        """What blocks depend on besides tokens, LoRA and salt: multimodal inputs, by vLLM's own rule."""
        if not request.mm_features:
            return None
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

    def _prompt_digest(self, request: Any) -> str | None:
        """See `wire.prompt_digest`; None if it cannot be told."""
        tokens = request.prompt_token_ids
        if tokens is None or request.prompt_embeds is not None:
            return None
        inputs = [(f.identifier, f.mm_position.offset, f.mm_position.length) for f in request.mm_features or ()]
        return wire.prompt_digest(tokens, self._seed(request), repr(inputs).encode() if inputs else b"")

    def _warn(self, key: str, text: str) -> None:
        """Say a thing once per process: a broken client would otherwise fill the log."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("kvreturn: %s", text)
