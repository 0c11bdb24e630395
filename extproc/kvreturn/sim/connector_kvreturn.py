"""kvreturn's connector plugin: D proves what it holds, P reads nothing that is not proven."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from kvreturn.core import wire
from kvreturn.sim.about import about
from kvreturn.sim.connector import EngineDiedError, Farewell, LoadError, Services, StuckError
from kvreturn.sim.connector_stock import HEARTBEATS, StockConnector
from kvreturn.sim.members import lease_end, says, well_formed
from kvreturn.sim.sequence import Sequence

_Checked = tuple[Mapping[str, Any], wire.Proof]
_USED_LIMIT = 65_536
_NOTHING_TO_FREE = ("used", "node_gone")


@dataclass(slots=True)
class _Plan:
    """What becomes of a P request's handle.

    Attributes:
        handle: D's object, if D can be asked about it.
        proven: tokens.
        reason: why not even that will be read.
        keep: whether D will come for the blocks.
        ids: whether the router asks for the prompt's token ids.
        freed: D's answer, where the request is only there to give the handle back.
        about: whether somebody asks what runs here.
    """

    handle: Mapping[str, Any] | None = None
    proven: int = 0
    reason: str | None = None
    keep: bool = True
    ids: bool = False
    freed: asyncio.Task[bool | None] | None = None
    about: bool = False


class KvreturnConnector(StockConnector):
    """On top of the stock connector.

    D: its handle carries a proof (wire.py); nothing is kept for requests that no P leg came before, nor where several
    choices would share one handle, nor where the router wants none, nor beyond the retention budget. It loads P's
    blocks only once, and only if P says that its prompt was the same.

    P: takes D's handle sealed under the `kvreturn` member of a cold request, or in the stock form. Reads at most the
    proven prefix; whatever goes wrong, it computes, and tells D to free its blocks. It reports in its reply. With
    `keep: false` beside the handle it keeps nothing for D, with `free: true` it reads nothing either.
    """

    _patience = 0.0

    def __init__(self, engine: Services) -> None:
        super().__init__(engine)
        self._used: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._plans: dict[Sequence, _Plan] = {}
        self._slack: dict[Sequence, float] = {}  # what was left of P's lease, in P's time less ours

    def arrived(self, seq: Sequence) -> None:
        """See `StockConnector.arrived`."""
        params = seq.job.params
        if params and says(params, "free", value=True) and (checked := self._check(params)) is not None:
            plan = self._plans[seq] = self._freeing(checked)
            plan.about = says(params, "about", value=True)
            return
        super().arrived(seq)
        if not params:
            return
        if params.get("do_remote_decode") and not seq.from_peer:
            plan = self._plans[seq] = self._prove(seq, params)
            plan.keep, plan.ids = not says(params, "keep", value=False), says(params, "ids", value=True)
            if plan.handle is not None and plan.reason not in (None, *_NOTHING_TO_FREE):
                self._engine.spawn(self._notify(plan.handle))
        # All choices of one request bring P's one handle. The first read frees P's blocks, so the others compute.
        elif seq.from_peer and not (self._acceptable(params) and self._use_up(params)):
            seq.from_peer = params["do_remote_prefill"] = False
        elif seq.from_peer and not self._same_prompt(seq, params):
            seq.from_peer = params["do_remote_prefill"] = False
            self._engine.spawn(self._notify(params))
        elif seq.from_peer and (expires := lease_end(params)) is not None:
            # While it waits for room, its heartbeats renew P's lease; the first comes after one interval.
            self._slack[seq] = expires - self._config.lease / HEARTBEATS - self._engine.now()

    async def load(self, seq: Sequence) -> int:
        """See `StockConnector.load`; raises nothing."""
        plan = self._plans.get(seq)
        if plan is None:
            slack = self._slack.pop(seq, None)
            if slack is not None and seq.job.params:
                seq.job.params["remote_blocks_expiry_time"] = self._engine.now() + slack
            try:
                return await super().load(seq)
            except (LoadError, StuckError, EngineDiedError):
                return 0
        read, reason = 0, plan.reason
        wanted = plan.proven - seq.local
        seq.report = wire.Report(plan.proven, 0, seq.local, reason)
        if plan.freed is not None:
            reason = {True: "freed", False: "used", None: "node_gone"}[await plan.freed]
        elif plan.handle is not None and reason is None:
            if wanted <= 0:
                reason = "local_hit"
            elif wanted < self._config.recompute_threshold:
                reason = "below_threshold"
            else:
                try:
                    await self._read_proven(plan.handle, seq, plan.proven)
                    read = wanted
                    reason = "local_hit" if seq.local else None
                except LoadError as error:
                    reason = error.reason
            if not read and reason not in _NOTHING_TO_FREE:
                self._engine.spawn(self._notify(plan.handle))
        seq.report = wire.Report(plan.proven, read, seq.local, reason)
        return read

    def finished(self, seq: Sequence, *, normally: bool) -> Farewell:
        """See `StockConnector.finished`."""
        plan = self._plans.pop(seq, None)
        self._slack.pop(seq, None)
        try:
            if plan is not None:
                return self._prefilled(seq, plan, normally=normally)
            return self._decoded(seq, normally=normally)
        except EngineDiedError:
            return Farewell()

    def _prefilled(self, seq: Sequence, plan: _Plan, *, normally: bool) -> Farewell:
        if seq.report is None and plan.handle is not None and plan.reason is None:
            self._engine.spawn(self._notify(plan.handle))  # it ended while it waited for room: D need not wait
        if seq.report is None or not normally:
            return Farewell()
        prompt = seq.job.prompt
        ids = prompt.tokens if plan.ids and not prompt.images else None
        told = about(self._config, self._engine.address) if plan.about else None
        report = replace(seq.report, prompt=self._prompt(seq), ids=ids, about=told)
        if not plan.keep:
            return Farewell({wire.MEMBER: wire.dump_report(report)})
        farewell = super().finished(seq, normally=normally)
        report = replace(report, expires=self._engine.now() + farewell.seconds)
        return replace(farewell, params={**(farewell.params or {}), wire.MEMBER: wire.dump_report(report)})

    def _decoded(self, seq: Sequence, *, normally: bool) -> Farewell:
        params = seq.job.params
        if not params or not seq.from_peer or says(params, "keep", value=False):
            return Farewell()
        farewell = super().finished(seq, normally=normally)
        if farewell.params is None or seq.job.choices > 1:
            return Farewell()
        budget = int(self._config.num_blocks * self._config.retention_budget)
        if not self._engine.holds.make_room(seq.blocks, budget):
            self._engine.counters.refused_pins += 1
            return Farewell()
        self._attach_proof(seq, farewell.params)
        # P's report came along: P runs this connector, which asks whether the blocks are still held.
        return replace(farewell, releasable=isinstance(params.get(wire.MEMBER), Mapping))

    def rejected(self, params: Mapping[str, Any]) -> None:
        """See `StockConnector.rejected`; raises nothing."""
        if params.get("do_remote_prefill") and self._acceptable(params):
            self._engine.spawn(self._notify(params))

    def _prompt(self, seq: Sequence) -> str:
        images = b"".join(p.to_bytes(4, "little") + d for p, d in sorted(seq.job.prompt.images.items()))
        return wire.prompt_digest(seq.job.prompt.tokens, self._seed(seq), images)

    # --- D ---

    def _same_prompt(self, seq: Sequence, params: Mapping[str, Any]) -> bool:
        """Whether P computed this very prompt, as far as it says what it computed."""
        member = params.get(wire.MEMBER)
        theirs = member.get("prompt") if isinstance(member, Mapping) else None
        return theirs is None or theirs == self._prompt(seq)

    def _attach_proof(self, seq: Sequence, handle: dict[str, Any]) -> None:
        config, seed, held = self._config, self._seed(seq), handle["remote_num_tokens"]
        proof = wire.Proof(
            block_size=config.block_size,
            scope=wire.scope_tag(seed),
            digests=wire.block_digests(seq.tokens[:held], config.block_size, seed, self._extra(seq)),
            generated=tuple(seq.generated),
            ttl=config.decoder_ttl,
        )
        handle[wire.MEMBER] = wire.dump_proof(proof)
        if config.secret:
            handle[wire.MEMBER] = wire.dump_proof(replace(proof, mac=wire.sign(config.secret, handle)))

    def _seed(self, seq: Sequence) -> bytes:
        return wire.chain_seed(self._config.secret, lora=seq.job.adapter, cache_salt=seq.job.salt)

    def _extra(self, seq: Sequence) -> dict[int, bytes]:
        """What blocks depend on besides tokens: the images in them."""
        joined: dict[int, bytes] = {}
        for position, digest in sorted(seq.job.prompt.images.items()):
            block = position // self._config.block_size
            joined[block] = joined.get(block, b"") + position.to_bytes(4, "little") + digest
        return {block: sha256(text).digest() for block, text in joined.items()}

    # --- P ---

    def _freeing(self, checked: _Checked | str) -> _Plan:
        if isinstance(checked, str):
            return _Plan(reason=checked, keep=False)
        return _Plan(keep=False, freed=self._engine.spawn(self._notify(checked[0])))

    def _check(self, params: Mapping[str, Any]) -> _Checked | str | None:
        """The handle in a request, if D can be asked about it; else why not; None without one."""
        sealed = params.get(wire.MEMBER)
        handle: object = params if params.get("remote_block_ids") else None
        if isinstance(sealed, Mapping) and "handle" in sealed:
            if sealed.get("v") != wire.VERSION:
                return "version"
            handle = sealed["handle"]
        if handle is None:
            return None
        if not isinstance(handle, Mapping) or not well_formed(handle):
            return "malformed"
        if not self._acceptable(handle):
            return "peer"
        try:
            proof = wire.load_proof(handle.get(wire.MEMBER))
            wire.check_mac(self._config.secret, handle, proof)
        except wire.WireError as error:
            # What is not provably D's own word is no reason to talk to anybody.
            return error.reason
        if len(handle["remote_block_ids"]) != 1:
            return "groups"  # hybrid models: a digest says nothing about the other groups' blocks
        if (
            not len(handle["remote_block_ids"][0])
            == -(-handle["remote_num_tokens"] // proof.block_size)
            == proof.blocks
        ):
            return "malformed"
        return handle, proof

    def _prove(self, seq: Sequence, params: Mapping[str, Any]) -> _Plan:
        """Check everything about a handle that can be checked without its peer."""
        checked = self._check(params)
        if checked is None or isinstance(checked, str):
            return _Plan(reason=checked)
        handle, proof = checked
        proven, reason = self._compare(seq, handle, proof)
        if reason is None and not self._use_up(handle):
            reason = "used"
        return _Plan(handle, proven, reason)

    def _compare(self, seq: Sequence, handle: Mapping[str, Any], proof: wire.Proof) -> tuple[int, str | None]:
        """How many tokens are proven, and why not any."""
        if not self._config.bidirectional:
            return 0, "disabled"
        if proof.block_size != self._config.block_size:
            return 0, "block_size"
        held, tokens = handle["remote_num_tokens"], seq.job.prompt.tokens
        try:
            proven = wire.proven_tokens(proof, held, tokens, self._seed(seq), self._extra(seq))
        except wire.WireError as error:
            return 0, error.reason
        return proven, None if proven else "not_a_continuation"

    def _use_up(self, handle: Mapping[str, Any]) -> bool:
        """A handle works once, whatever comes of it. Returns whether this is that time."""
        key = (handle["remote_engine_id"], handle["remote_request_id"])
        if key in self._used:
            return False
        self._used[key] = None
        if len(self._used) > _USED_LIMIT:
            self._used.popitem(last=False)
        return True

    def _acceptable(self, handle: Mapping[str, Any]) -> bool:
        """Whether a handle is whole and names a peer that may be contacted."""
        allowed = self._config.allowed_peers
        return well_formed(handle) and (allowed is None or handle["remote_host"] in allowed)

    async def _read_proven(self, handle: Mapping[str, Any], seq: Sequence, proven: int) -> None:
        peer = await self._peer(handle)
        self._check_expiry(handle, peer)
        size = self._config.block_size
        first, end = seq.local // size, -(-proven // size)
        theirs, own = handle["remote_block_ids"][0][first:end], seq.blocks[first:end]
        await self._transfer(peer, handle["remote_request_id"], theirs, own, proven - seq.local, held_only=True)
