"""The prefill node's requests: what becomes of a handle from a request's arrival to its end. No vLLM in here."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvreturn_connector import wire
from kvreturn_connector.counts import ReadCounts
from kvreturn_connector.handles import REMOTE, Offer, check_handle, open_offer, prove
from kvreturn_connector.prompts import Prompts
from kvreturn_connector.settings import Settings
from kvreturn_connector.sidechannel import Asker

_DROPPED = frozenset({*REMOTE, wire.MEMBER, "remote_num_tokens", "remote_blocks_expiry_time"})
_LOADED = "_remote_blocks_processed"  # vLLM's mark on a request whose load was started, or was not needed


@dataclass
class _Read:
    """One request.

    Attributes:
        offer: the handle that came with it, if it can be used, or at least be given back.
        reason: why nothing is read of it.
        asked: D's answer to the claim, or to the release of a request that frees.
        decided: no more questions.
        local: tokens that were here.
        read: tokens to read, or read.
        keep: whether a decode node will come for our blocks.
        free: whether the request is only there to give the handle back.
        ids: whether the router asks for the prompt's token ids.
        about: whether somebody asks what runs here.
    """

    offer: Offer | None = None
    reason: str | None = None
    asked: "Future[str] | None" = None
    decided: bool = False
    local: int = 0
    read: int = 0
    keep: bool = True
    free: bool = False
    ids: bool = False
    about: bool = False


class Reads:
    """All requests that this node prefills.

    Args:
        settings: ours.
        prompts: digests of requests.
        asker: asks D.
        warn: takes a key and a text for the log.
        about: tells what runs here.

    Attributes:
        counts: what became of handles.
    """

    def __init__(
        self,
        settings: Settings,
        prompts: Prompts,
        asker: Asker,
        warn: Callable[[str, str], None],
        about: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._settings = settings
        self._prompts = prompts
        self._asker = asker
        self._warn = warn
        self._about = about
        self._reads: dict[str, _Read] = {}
        self.counts = ReadCounts()

    def knows(self, request: Any) -> bool:
        """Whether a request is one of them."""
        return request.request_id in self._reads

    # --- arrival ---

    def admit(self, request: Any, params: Mapping[str, Any]) -> dict[str, Any]:
        """Check a prefill request's parameters, and the handle in them.

        Returns:
            The parameters that vLLM may see. They are cold: the handle is kept aside until it is decided.
        """
        read = self._reads[request.request_id] = _Read()
        member = params.get(wire.MEMBER)
        if isinstance(member, Mapping):
            read.keep, read.ids = member.get("keep") is not False, member.get("ids") is True
        handle = open_offer(params)
        if handle is not None:
            self._examine(request, handle, read)
        return {key: value for key, value in params.items() if key not in _DROPPED} | dict.fromkeys(REMOTE)

    def free(self, request: Any, handle: Mapping[str, Any], *, about: bool = False) -> dict[str, Any]:
        """A request that is only there to give a handle back.

        Args:
            request: vLLM's.
            handle: D's object; an empty one where the request only asks.
            about: whether it asks what runs here.

        Returns:
            The parameters that vLLM may see: none.
        """
        read = self._reads[request.request_id] = _Read(keep=False, free=True, decided=True, about=about)
        try:
            read.offer, _ = check_handle(handle, self._settings)
        except wire.WireError as e:
            if handle:
                self._warn(e.reason, f"handle not freed ({e})")
            read.reason = e.reason
        else:
            read.asked = self._let_go(read.offer)
        return {}

    def _examine(self, request: Any, handle: Mapping[str, Any], read: _Read) -> None:
        try:
            read.offer, proof = check_handle(handle, self._settings)
            read.offer = self._compared(request, read.offer, proof)
        except wire.WireError as e:
            self._warn(e.reason, f"handle not used ({e}): computing")
            read.reason = e.reason
        if read.offer and not read.reason and not read.offer.proven:
            read.reason = "not_a_continuation"
        if read.reason:
            read.decided = True
            if read.offer:
                self._let_go(read.offer)

    def _compared(self, request: Any, offer: Offer, proof: wire.Proof) -> Offer:
        if not self._settings.bidirectional:
            raise wire.WireError("disabled", "bidirectional_kv_xfer is off here: set it on both sides")
        tokens = request.prompt_token_ids
        if tokens is None or request.prompt_embeds is not None:
            raise wire.WireError("malformed", "the prompt has no token ids")
        seed, inputs = self._prompts.seed(request), self._prompts.inputs(request, len(tokens))
        return prove(offer, proof, tokens, self._prompts.block_size, seed, inputs)

    # --- scheduling ---

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `get_num_new_matched_tokens` of vLLM's connectors. None while D is being asked."""
        read, params = self._reads[request.request_id], request.kv_transfer_params
        if params.get(_LOADED):
            # One load per request. After a failed one, vLLM asks again and would wait for a load that nobody starts.
            read.local = num_computed_tokens
            return 0, False
        if read.offer is None or (read.decided and read.read == 0):
            read.local = max(read.local, num_computed_tokens)
            if read.free and read.asked:
                if not read.asked.done():
                    return None, False
                read.reason = read.asked.result() or "freed"
            return 0, False
        read.local = num_computed_tokens
        wanted = min(read.offer.proven, request.num_prompt_tokens) - num_computed_tokens
        if wanted <= 0 or wanted < self._settings.threshold:
            read.decided, read.read = True, 0
            read.reason = "local_hit" if wanted <= 0 else "below_threshold"
            self._let_go(read.offer)
            return 0, False
        if not read.decided:
            if read.asked is None:
                read.asked = self._asker.claim(read.offer.address, read.offer.request_id, read.offer.ticket)
            if not read.asked.done():
                return None, False
            read.decided, read.reason = True, read.asked.result() or None
            if read.reason:
                return 0, False
            params.update(read.offer.remote_fields())
        read.read = wanted
        return wanted, True

    def allocated(self, request: Any, num_external_tokens: int) -> None:
        """VLLM has room for the request, and reads so many tokens."""
        read, params = self._reads[request.request_id], request.kv_transfer_params
        if num_external_tokens or params.get(_LOADED):
            return
        if read.decided and read.offer and params.get("remote_block_ids"):
            read.read, read.reason = 0, "local_hit"  # vLLM declined the load: prompt log probabilities, for example
            self._let_go(read.offer)
        params.update(dict.fromkeys(REMOTE))

    def failed(self, request_id: str) -> None:
        """A load failed; vLLM computes."""
        read = self._reads.get(request_id)
        if read is not None:
            read.read, read.reason = 0, "read_failed"

    # --- the end ---

    def finish(self, request: Any) -> tuple[wire.Report, bool] | None:
        """Forget a request.

        Returns:
            The report on it, and whether its blocks are to be kept for a decode node; None if it was no prefill.
        """
        read = self._reads.pop(request.request_id, None)
        if read is None:
            return None
        if read.offer and read.reason is None and not request.kv_transfer_params.get(_LOADED):
            self._let_go(read.offer)  # it ended before its handle was decided or loaded
        proven = read.offer.proven if read.offer else 0
        if not read.free and (read.offer or read.reason):
            self.counts.add(proven, read.read, read.reason)
        ids = self._prompts.ids(request) if read.ids else None
        digest = self._prompts.digest(request)
        about = self._about() if read.about else None
        return wire.Report(proven, read.read, read.local, read.reason, digest, ids=ids, about=about), read.keep

    def _let_go(self, offer: Offer) -> "Future[str]":
        """D need not wait."""
        return self._asker.release(offer.address, offer.request_id, offer.ticket)
