"""The scheduler's side of the connector: what is pinned on D, what is proven and read on P."""

import logging
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

from kvreturn_connector import wire
from kvreturn_connector.about import about
from kvreturn_connector.handles import Once, check_blocks, check_peer, to_free
from kvreturn_connector.pins import PinTable, ticket
from kvreturn_connector.prompts import Prompts
from kvreturn_connector.reads import Reads
from kvreturn_connector.settings import Settings
from kvreturn_connector.sidechannel import Asker, listen

logger = logging.getLogger("vllm.kvreturn")
RELEASED = "kvreturn_released"  # attribute of the metadata that goes to the workers
_SLACK = "_kvreturn_slack"  # in a request's parameters: what is left of P's lease, see `_lease_left`


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
        self._prompts = Prompts(settings.secret, self.block_size)
        self._asker = Asker(settings.claim_timeout)
        self._reads = Reads(settings, self._prompts, self._asker, self._warn, self._about)
        self.read_counts = self._reads.counts
        self._loads = Once()  # P's requests that were read here
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
        unwanted = to_free(params)
        if unwanted is not None:
            return self._reads.free(request, unwanted, about=params[wire.MEMBER].get("about") is True)
        if params.get("do_remote_prefill"):
            return self._admitted_to_read_whole(request, params)
        if params.get("do_remote_decode"):
            if self.vllm_config.kv_transfer_config.kv_role == "kv_consumer":
                self._warn("role", "a prefill request came to a decode node: its kv_transfer_params are ignored")
                return None
            return self._reads.admit(request, params)
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
        # All choices of one request bring P's one handle, and a retry brings it again. P frees its blocks after the
        # first read, so whoever comes later would read what is there by then.
        if not self._loads.first((params["remote_engine_id"], params["remote_request_id"])):
            return None
        member = params.get(wire.MEMBER)
        report = member if isinstance(member, Mapping) else {}
        theirs = report.get("prompt")
        if theirs is not None and theirs != self._prompts.digest(request):
            self._warn("prompt", "the prefill node computed another prompt than ours (template? tokenizer?): computing")
            self._mismatched.add(request.request_id)
        return {**params, _SLACK: self._lease_left(wire.seconds(report.get("expires")))}

    def _lease_left(self, expires: float | None) -> float | None:
        """How long P surely keeps the blocks, on P's clock less ours; None if P does not say.

        From its arrival on, a waiting request renews P's lease by heartbeats, the first one after up to one interval.
        So what counts is what was left then, however long the request has to wait for room here.
        """
        return None if expires is None else expires - self._heartbeat_interval - time.perf_counter()

    # --- scheduling ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens to read beyond what is here. None while a peer is being asked."""
        if request.request_id in self._mismatched:
            return 0, False
        if self._reads.knows(request):
            return self._reads.matched(request, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """VLLM has room for the request: start the load, if there is one."""
        params = request.kv_transfer_params
        if self._reads.knows(request):
            self._reads.allocated(request, num_external_tokens)
        elif params and params.get(_SLACK) is not None:
            # vLLM's worker compares this with P's clock just before it reads.
            params["remote_blocks_expiry_time"] = time.perf_counter() + params[_SLACK]
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers' news: loads that failed, pins that are over."""
        super().update_connector_output(connector_output)
        for request_id in connector_output.failed_recving or ():
            self._reads.failed(request_id)
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
        prefill = self._reads.finish(request)
        self._mismatched.discard(request.request_id)
        delay, out = super().request_finished(request, block_ids)
        if prefill is None:
            return (delay, None) if out is None else self._returned(request, params, out, delay=delay)
        report, keep = prefill
        if not keep:
            self._unpin(request, delay=delay)
            return False, {wire.MEMBER: wire.dump_report(report)}
        if out is not None:
            report = replace(report, expires=self._reqs_need_send.get(request.request_id))
            out[wire.MEMBER] = wire.dump_report(report)
        return delay, out

    def _unpin(self, request: Any, *, delay: bool) -> None:
        """Take back that vLLM keeps the blocks of a finished request."""
        if delay:
            self._reqs_need_send.pop(request.request_id, None)
            self._reqs_not_processed.add(request.request_id)

    def _returned(
        self, request: Any, params: Mapping[str, Any], out: dict[str, Any], *, delay: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """D's handle, if the turn may leave one."""
        keep = self._worth_keeping(params, out)
        if keep:
            (blocks,) = out["remote_block_ids"]
            held, named = self._prompts.held(request, blocks)
            tokens, inputs = request.all_token_ids[:held], self._prompts.inputs(request, held)
            digests = wire.block_digests(tokens, self.block_size, self._prompts.seed(request), inputs)
            mark = ticket(self.engine_id, request.request_id, named, held, digests)
            reader_asks = isinstance(params.get(wire.MEMBER), Mapping)  # P runs our connector: its report came along
            keep = self.pins.pin(request.request_id, blocks, mark, releasable=reader_asks)
        if not keep:
            self._unpin(request, delay=delay)
            return False, None
        out["remote_block_ids"], out["remote_num_tokens"] = [named], held
        proof = wire.Proof(
            self.block_size,
            wire.scope_tag(self._prompts.seed(request)),
            digests,
            tuple(request.output_token_ids),
            self.settings.ttl,
        )
        out[wire.MEMBER] = wire.dump_proof(proof)
        if self.settings.secret:
            out[wire.MEMBER] = wire.dump_proof(replace(proof, mac=wire.sign(self.settings.secret, out)))
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

    def _about(self) -> dict[str, Any]:
        return about(self.vllm_config, self.settings, (self.side_channel_host, self.side_channel_port))

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

    def _warn(self, key: str, text: str) -> None:
        """Say a thing once per process: a broken client would otherwise fill the log."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("kvreturn: %s", text)
