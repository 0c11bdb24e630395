"""vLLM 0.32.0's NixlConnector (pull mode), with all that it does when a handle is wrong."""

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import Any

from kvreturn.sim.connector import EngineDiedError, Farewell, LoadError, Peer, Services, StuckError
from kvreturn.sim.fabric import Address, RefusedError, UnreachableError
from kvreturn.sim.sequence import Sequence

_REMOTE_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
HEARTBEATS = 6  # of a waiting request, in the time of one lease
_EXPIRY_MARGIN = 5.0  # seconds; vLLM declines reads that close to the deadline


class StockConnector:
    """Loads a prompt's blocks from a peer and offers a finished request's blocks to one.

    `kv_transfer_params` alone decide which side a request is on: `do_remote_decode` makes it a prefill (P) request,
    `do_remote_prefill` a decode (D) request whose prompt P has computed.
    """

    _patience = 1.0  # how long failures take, in parts of what they take in vLLM

    def __init__(self, engine: Services) -> None:
        self._engine = engine
        self._config = engine.config
        self._peers: dict[str | None, Peer] = {}
        self._handshakes = asyncio.Lock()  # they queue behind each other

    # --- a request's life ---

    def arrived(self, seq: Sequence) -> None:
        """A request was accepted."""
        params = seq.job.params
        seq.from_peer = bool(params and params.get("do_remote_prefill"))
        if params and seq.from_peer and isinstance(params.get("remote_prefill_cached_tokens"), int):
            seq.reported_cached = params["remote_prefill_cached_tokens"]

    async def heartbeat(self, seq: Sequence) -> None:
        """Renew P's lease while a D request waits for blocks; endless, to be cancelled."""
        params = seq.job.params or {}
        if not seq.from_peer or any(params.get(key) is None for key in _REMOTE_KEYS):
            return
        while True:
            await self._engine.clock.sleep(self._config.lease / HEARTBEATS)
            try:
                peer = await self._peer(params)
                await self._engine.fabric.notify(
                    peer.address, peer.engine_id, params["remote_request_id"], heartbeat=True
                )
            except (LoadError, RefusedError, UnreachableError):
                continue

    async def load(self, seq: Sequence) -> int:
        """Load what the request's handle offers beyond the local prefix cache hit, into the sequence's blocks.

        Returns:
            Number of tokens loaded.

        Raises:
            LoadError: with policy `fail`.
            StuckError: vLLM would wait for ever.
            EngineDiedError: vLLM's engine would die.
        """
        params = seq.job.params
        if not params:
            return 0
        external = self._matched(params, seq)
        starts = self._starts(params, external)
        params["do_remote_prefill"] = False  # one load per request
        if external and not starts:
            raise StuckError
        if not starts:
            return 0
        if not external:
            # Everything is cached already, or too little is missing: only free the peer's blocks.
            self._engine.spawn(self._notify(params))
            return 0
        try:
            await self._read(params, seq, external)
        except LoadError:
            if self._config.load_failure_policy == "fail":
                raise
            if seq.from_peer:
                return 0
            # On P the request asks for the same load again, and nobody starts it a second time.
            raise StuckError from None
        return external

    def finished(self, seq: Sequence, *, normally: bool) -> Farewell:
        """A request has ended; `normally` means by stop token or length."""
        params = seq.job.params
        if not params:
            return Farewell()
        on_p = bool(params.get("do_remote_decode"))
        if params.get("do_remote_prefill"):  # it never got so far as to load
            self.rejected(params)
            return Farewell()
        if not normally or not (on_p or self._config.bidirectional):
            return Farewell()
        seconds = self._config.lease if on_p else self._config.decoder_ttl
        handle = self._handle(seq, on_p=on_p, expiry=None if on_p else self._engine.now() + seconds)
        return Farewell(handle, "lease" if on_p else "pin", seconds)

    def rejected(self, params: Mapping[str, Any]) -> None:
        """A request with `do_remote_prefill` was refused before it reached the engine: tell the peer to free.

        Raises:
            EngineDiedError: the handle lacks a key.
        """
        if not params.get("do_remote_prefill"):
            return
        if "remote_block_ids" not in params or any(key not in params for key in _REMOTE_KEYS):
            raise EngineDiedError("KeyError in build_connector_meta")
        self._engine.spawn(self._notify(params))

    # --- parts ---

    def _matched(self, params: Mapping[str, Any], seq: Sequence) -> int:
        """Tokens that a peer has beyond the local hit; nothing but counts is compared."""
        if params.get("do_remote_prefill"):
            return max(0, seq.prompt_length - seq.local)
        if not (
            params.get("do_remote_decode")
            and params.get("remote_block_ids")
            and all(key in params for key in _REMOTE_KEYS)
        ):
            return 0
        held = params.get("remote_num_tokens") or 0
        if not isinstance(held, int | float):
            raise EngineDiedError("remote_num_tokens is no number")
        count = int(min(held, seq.prompt_length)) - seq.local
        return count if count > 0 and count >= self._config.recompute_threshold else 0

    def _starts(self, params: Mapping[str, Any], external: int) -> bool:
        """Whether a load is really started for the tokens that were promised."""
        if not (params.get("do_remote_prefill") or (params.get("do_remote_decode") and self._config.bidirectional)):
            return False
        if not params.get("remote_block_ids"):
            if external:
                raise EngineDiedError("assert num_external_tokens == 0")
            return False
        return all(key in params for key in _REMOTE_KEYS)

    async def _read(self, params: Mapping[str, Any], seq: Sequence, external: int) -> None:
        peer = await self._peer(params)
        self._check_expiry(params, peer)
        size = self._config.block_size
        first = seq.local // size
        own = seq.blocks[first : -(-(seq.local + external) // size)]
        groups = params["remote_block_ids"]
        if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], list):
            raise EngineDiedError("assert on the number of KV cache groups")
        if len(own) > len(groups[0]):
            raise EngineDiedError("assert num_decode_blocks <= num_prefill_blocks")
        # The list is trimmed at its front, since what is cached locally is a prefix. So a peer that holds more than
        # the prompt's length is read at the wrong end.
        theirs = groups[0][-len(own) :]
        if not all(isinstance(block, int) for block in theirs):
            raise EngineDiedError("block ids are no numbers")
        await self._transfer(peer, params["remote_request_id"], theirs, own, external)

    async def _transfer(  # noqa: PLR0913 - one transfer has that many ends
        self,
        peer: Peer,
        request_id: str,
        theirs: List[int],
        own: List[int],
        tokens: int,
        *,
        held_only: bool = False,
    ) -> None:
        """Copy blocks and tell the peer to free them."""
        engine, counters = self._engine, self._engine.counters
        seconds = self._config.timing.transfer(tokens)
        await engine.clock.sleep(seconds)
        try:
            raw = await engine.fabric.read(peer.address, peer.engine_id, theirs, request_id, held_only=held_only)
        except (RefusedError, UnreachableError) as error:
            counters.failed_transfers += 1
            await engine.clock.sleep(self._patience * self._config.timing.failed_read)
            gone = isinstance(error, UnreachableError) or error.reason in ("engine_id", "dead")
            used = isinstance(error, RefusedError) and error.reason == "not_held"
            raise LoadError("used" if used else "node_gone" if gone else "read_failed") from error
        engine.pool.restore(own, raw)
        counters.transfers += 1
        counters.transfer_seconds += seconds
        counters.transferred_bytes += tokens * self._config.timing.bytes_per_token

    async def _notify(self, params: Mapping[str, Any]) -> bool | None:
        """Tell the peer to free. Returns whether it kept anything, None if it cannot be told."""
        try:
            peer = await self._peer(params)
            return await self._engine.fabric.notify(peer.address, peer.engine_id, str(params["remote_request_id"]))
        except (LoadError, RefusedError, UnreachableError):
            self._engine.counters.failed_notifications += 1
        except EngineDiedError:
            self._engine.die()
        return None

    async def _peer(self, params: Mapping[str, Any]) -> Peer:
        """The peer a handle names. Known engines are taken from memory, whatever address the handle says."""
        engine_id, host, port = params["remote_engine_id"], params["remote_host"], params["remote_port"]
        if not isinstance(engine_id, str | None):
            raise EngineDiedError("unhashable engine id")
        async with self._handshakes:
            if engine_id in self._peers:
                return self._peers[engine_id]
            start = self._engine.clock.now()
            try:
                if not isinstance(host, str) or not isinstance(port, int):
                    raise UnreachableError("no address")  # noqa: TRY301 - fails like any wrong address
                address = Address(host, port)
                identity = await self._engine.fabric.identity(address)
            except (UnreachableError, RefusedError) as error:
                spent = self._engine.clock.now() - start
                await self._engine.clock.sleep(self._patience * self._config.timing.unreachable - spent)
                raise LoadError("node_gone") from error
            if identity.engine_id != engine_id or identity.block_size != self._config.block_size:
                await self._engine.clock.sleep(self._patience * self._config.timing.mismatch)
                raise LoadError("node_gone")
            if not params.get("tp_size", 1):
                raise LoadError("malformed")
            peer = Peer(address, identity.engine_id, identity.now - self._engine.now())
            self._peers[identity.engine_id] = peer
            return peer

    def _check_expiry(self, params: Mapping[str, Any], peer: Peer) -> None:
        expiry = params.get("remote_blocks_expiry_time")
        if not self._config.bidirectional or not isinstance(expiry, int | float):
            return
        if self._engine.now() + peer.offset + _EXPIRY_MARGIN >= expiry:
            self._engine.counters.expired_reads += 1
            raise LoadError("expired")

    def _handle(self, seq: Sequence, *, on_p: bool, expiry: float | None) -> dict[str, Any]:
        handle = {
            "do_remote_prefill": on_p,
            "do_remote_decode": not on_p,
            "remote_block_ids": [list(seq.blocks)],
            "remote_engine_id": self._engine.id,
            "remote_request_id": seq.request_id,
            "remote_host": self._engine.address.host,
            "remote_port": self._engine.address.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(seq.tokens) - 1,  # the KV of the last token is not computed
            "remote_blocks_expiry_time": expiry,
            "transfer_mode": "pull",
        }
        if on_p:
            handle["remote_prefill_cached_tokens"] = seq.local + seq.external
        return handle
