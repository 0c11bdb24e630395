"""One conversation of two turns between a prefill and a decode node, without router and gateway: what do they do?

The prompt is random token ids that are in every vocabulary, so it meets nobody's cached prefix and no session.
"""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvreturn.core import wire
from kvreturn.core.address import is_local, split_address
from kvreturn.core.handle import COLD, PARAMS, Handle, HandleError, check_mac, digest_seed, read_handle, sealed
from kvreturn.core.returning import PATH, Form, free_body, probe_body, read_probe
from kvreturn.doctor.context import OK, Answer, Context, Node
from kvreturn.doctor.model import Finding, fail, ok, skipped, warn
from kvreturn.doctor.secret import SAME, of_handle

_IDS = range(33, 127)
_PROMPT = 96
_MORE = 8  # tokens that the second turn adds
_SPARE = 40  # tokens that the answer has over the threshold below which nothing is read
_LONGEST = 512
_PAIRS, _COVER = 16, 64  # pairs that are probed; more if it takes more to have each node in one
_NAMED = 8
DECODE = 2  # times as long as another request may one take that generates an answer
_REMEDIES = {
    "block_size": "start all nodes with the same --block-size",
    "disabled": "set bidirectional_kv_xfer to true on the prefill node",
    "peer": "list the decode node in allowed_peers of the prefill node's kv_connector_extra_config",
    "node_gone": "set VLLM_NIXL_SIDE_CHANNEL_HOST of the decode node to an address that the prefill node reaches, and "
    "open VLLM_NIXL_SIDE_CHANNEL_PORT between them",
    "used": "raise retention_budget on the decode node, or give it more KV blocks",
    "expired": "raise decoder_kv_blocks_ttl on the decode node",
    "read_failed": "look for NIXL's error in the prefill node's log; UCX_TLS and open ports are the usual causes",
    "scope": SAME,
    "mac": SAME,
    "version": "run the same kvreturn-connector on both nodes",
    "no_digests": "run kvreturn-connector on the decode node",
    "groups": "this model has several KV cache groups, which cannot be proven: set proof to `off` for it",
    "not_a_continuation": "the two nodes count tokens differently: run the same model, tokenizer and vLLM on both",
}


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the first turn left.

    Attributes:
        raw: D's object as it came.
        handle: as the router would read it.
        prompt: token ids.
    """

    raw: dict[str, Any]
    handle: Handle
    prompt: list[int]


async def probe_pairs(ctx: Context) -> list[Finding]:
    """Probe all pairs of nodes; of many, some such that each node is in one at least."""
    prefill = [n for n in ctx.nodes if n.side == "prefill" and n.connector in {"kvreturn", "stock"}]
    decode = [n for n in ctx.nodes if n.side == "decode" and n.connector in {"kvreturn", "stock"}]
    if not (prefill and decode):
        return [skipped("pair", "needs a prefill and a decode node that answer and have a NIXL connector")]
    pairs, rest = choose([p.address for p in prefill], [d.address for d in decode])
    by_address = {("p", p.address): p for p in prefill} | {("d", d.address): d for d in decode}
    probes = (_findings(ctx, by_address["p", p], by_address["d", d]) for p, d in pairs)
    findings = [f for each in await asyncio.gather(*probes) for f in each]
    if rest:
        names = ", ".join(f"{p} -> {d}" for p, d in rest[:_NAMED])
        more = f" and {len(rest) - _NAMED} more" if len(rest) > _NAMED else ""
        why = f"{len(rest)} of {len(pairs) + len(rest)} pairs were not probed: {names}{more}"
        findings.append(skipped("pair", why, remedy="each of their nodes was probed in another pair"))
    return findings


def choose(prefill: Sequence[str], decode: Sequence[str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Which pairs to probe, and which are left."""
    number = max(len(prefill), len(decode))
    cover = list(itertools.islice(zip(itertools.cycle(prefill), itertools.cycle(decode), strict=False), number))
    pairs = [*cover, *(pair for pair in itertools.product(prefill, decode) if pair not in set(cover))]
    probed = max(_PAIRS, min(number, _COVER))
    return pairs[:probed], pairs[probed:]


async def _findings(ctx: Context, p: Node, d: Node) -> list[Finding]:
    return [finding async for finding in _Probe(ctx, p, d).run()]


class _Probe:
    def __init__(self, ctx: Context, p: Node, d: Node) -> None:
        self._ctx, self._p, self._d = ctx, p, d
        self._name = f"{p.address} -> {d.address}"
        common = [m for m in p.models if m in d.models]
        self._model = (common or list(p.models))[0]
        threshold = p.flags.threshold if p.flags and p.flags.threshold else 64
        # A stock node's stream may leave a handle that it does not show, and then its blocks stay until its TTL. And it
        # proves nothing, so one token does.
        short = d.connector == "stock"
        self._length, self._answer = (1, 1) if short else (_PROMPT, min(int(threshold) + _SPARE, _LONGEST))

    async def run(self) -> AsyncIterator[Finding]:
        turn, findings = await self._first_turn()
        for finding in findings:
            yield finding
        if turn is None:
            return
        yield self._secret(turn)
        async for finding in self._side_channel(turn):
            yield finding
        yield await self._second_turn(turn)

    # --- the first turn ---

    async def _first_turn(self) -> tuple[_Turn | None, list[Finding]]:
        check = "streams"
        prompt = self._new_tokens(self._length)
        answer, params = await self._prefill(prompt, COLD)
        if params is None:
            return None, [fail("pair", f"prefill: {answer.what}", "look into the prefill node's log", self._name)]
        answer, raw = await self._decode(prompt, params, stream=True)
        if answer.status != OK:
            return None, [fail("pair", f"decode: {answer.what}", "look into the decode node's log", self._name)]
        findings = []
        if raw is not None:
            findings.append(ok(check, "the terminal event of a stream carries the handle", self._name))
        else:
            prompt = self._new_tokens(self._length)
            _, params = await self._prefill(prompt, COLD)
            answer, raw = await self._decode(prompt, params or {}, stream=False)
            findings.append(self._no_handle(check, whole=raw is not None))
        if raw is None:
            return None, findings
        try:
            handle = read_handle(json.dumps(raw).encode(), split_address(self._d.address)[0])
        except HandleError as e:
            what = f"the decode node's handle is of no use: {e}"
            return None, [*findings, fail("handle", what, "run vLLM 0.32.0 and kvreturn-connector there", self._name)]
        return _Turn(raw, handle, prompt), findings

    def _no_handle(self, check: str, *, whole: bool) -> Finding:
        if whole:
            what = "the decode node's streams carry no handle, its whole answers do (released vLLM has no such member)"
            remedy = "install kvreturn-connector there, whose plugin adds it, and do not set KVRETURN_STREAMS=0"
            return fail(check, what, remedy, self._name)
        what = "the decode node leaves no handle"
        remedy = "see the check `flags.secret`, if that failed; set bidirectional_kv_xfer to true there"
        if self._d.connector == "kvreturn":
            remedy += "; if it is, its retention_budget may be used up (vllm:kvreturn_pins_refused_total)"
        return fail(check, what, remedy, self._name)

    async def _prefill(self, prompt: Sequence[int], params: bytes) -> tuple[Answer, dict[str, Any] | None]:
        answer = await self._ctx.post(f"http://{self._p.address}{PATH}", self._body(prompt, 1, params))
        body = answer.json()
        told = body.get(PARAMS) if answer.status == OK and isinstance(body, dict) else None
        return answer, told if isinstance(told, dict) else None

    async def _decode(
        self, prompt: Sequence[int], params: dict[str, Any], *, stream: bool
    ) -> tuple[Answer, dict[str, Any] | None]:
        """D's answer, and the handle in it."""
        body = self._body(prompt, self._answer, json.dumps(params).encode(), stream=stream)
        answer = await self._ctx.post(f"http://{self._d.address}{PATH}", body, times=DECODE)
        found = None
        for piece in answer.body.split(b"\n") if stream else [answer.body]:
            whole = Answer(body=piece.removeprefix(b"data:").strip()).json()
            if isinstance(whole, dict) and isinstance(whole.get(PARAMS), dict):
                found = whole[PARAMS]
        return answer, found

    def _body(self, prompt: Sequence[int], tokens: int, params: bytes, *, stream: bool = False) -> bytes:
        head = {"model": self._model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": stream}
        return b'%s,"ignore_eos":true,"%s":%s}' % (json.dumps(head).encode()[:-1], PARAMS.encode(), params)

    # --- what the handle tells ---

    def _secret(self, turn: _Turn) -> Finding:
        check, proof = "secret", turn.handle.proof
        if proof is None:
            return skipped(check, "stock nodes have none", self._name)
        known = of_handle(self._name, self._d.flags, self._ctx.settings, self._ctx.router_scope)
        if known:
            return known
        secret = self._ctx.settings.secret.get_secret_value().encode()
        same = wire.scope_tag(digest_seed(proof, secret, lora=self._model, cache_salt="")) == proof.scope
        try:
            check_mac(secret, turn.handle)
        except wire.WireError:
            same = False
        if not same:
            what = "the decode node's handles are made under another secret than the router's"
            if not secret:
                what = "the decode node has a secret, the router has none"
            elif proof.mac is None:
                what = "the router has a secret, the decode node has none"
            return fail(check, what, SAME, self._name)
        if not secret:
            return warn(check, "none, on router and decode node: handles have no MAC", SAME, self._name)
        return ok(check, "the same on router and decode node", self._name)

    async def _side_channel(self, turn: _Turn) -> AsyncIterator[Finding]:
        host, port = turn.raw.get("remote_host"), turn.raw.get("remote_port")
        if not isinstance(host, str) or not isinstance(port, int):
            return
        here, there = split_address(self._p.address)[0], split_address(self._d.address)[0]
        if is_local(host) and here != there:
            what = f"the handle names {host}, and the prefill node is on another machine"
            remedy = "set VLLM_NIXL_SIDE_CHANNEL_HOST of the decode node to its address"
            yield fail("side_channel", what, remedy, self._name)
            return
        target = there if is_local(host) else host
        error = await self._ctx.connects(target, port)
        hint = "a hint only: it is the prefill node that must reach it"
        if error:
            remedy = f"open port {port} of {target} to the prefill nodes; see what the check `proof` says"
            yield warn("side_channel", f"{target}:{port} from here: {error} ({hint})", remedy, self._name)
        else:
            yield ok("side_channel", f"{target}:{port} accepts connections from here ({hint})", self._name)

    # --- the second turn ---

    async def _second_turn(self, turn: _Turn) -> Finding:
        check, proof = "proof", turn.handle.proof
        if self._p.connector != "kvreturn" or proof is None:
            side = "prefill" if proof else "decode"
            await self._free(turn.handle)
            return skipped(check, f"the {side} node runs the stock connector, which proves nothing", self._name)
        prompt = [*turn.prompt, *proof.generated, *self._new_tokens(_MORE)]
        answer, told = await self._prefill(prompt, sealed(turn.handle, keep=False))
        try:
            report = wire.load_report((told or {}).get(wire.MEMBER))
        except wire.WireError as e:
            await self._free(turn.handle)
            remedy = "look into the prefill node's log"
            return fail(check, f"no report from the prefill node ({e.reason}; {answer.what[:100]})", remedy, self._name)
        if not report.read and report.reason not in {"local_hit", "below_threshold", "used"}:
            await self._free(turn.handle)
        return self._read(report, turn.handle.tokens, answer.seconds)

    def _read(self, report: wire.Report, held: int, seconds: float) -> Finding:
        check = "proof"
        if report.read and report.proven == held:
            what = f"{held} tokens proven, {report.read} read back, in {seconds * 1e3:.0f} ms"
            return ok(check, what, self._name)
        if report.proven == held and report.reason in {"local_hit", "below_threshold"}:
            what = f"{held} tokens proven; too few were missing to read any ({report.reason})"
            return warn(check, what, "lower kv_recompute_threshold on the prefill node, to see a read", self._name)
        reason = report.reason or "not_a_continuation"
        what = f"{report.proven} of {held} tokens proven, {report.read} read: {reason}"
        return fail(check, what, _REMEDIES.get(reason, "see docs/handle-format.md for the reason"), self._name)

    async def _free(self, handle: Handle) -> None:
        """Leave nothing pinned on D: it lets go itself if it runs our connector, else P tells it so."""
        if self._d.connector == "kvreturn":
            answer = await self._ctx.post(f"http://{self._d.address}{PATH}", free_body(Form.SEALED, handle))
            if b'"freed"' in answer.body or b'"used"' in answer.body:
                return
        await self._ctx.post(f"http://{self._p.address}{PATH}", free_body(None, handle))

    @staticmethod
    def _new_tokens(number: int) -> list[int]:
        return [random.choice(_IDS) for _ in range(number)]  # noqa: S311 - to be new, not secret


async def probe_stock(ctx: Context) -> None:
    """Find out of stock prefill nodes whether they have `bidirectional_kv_xfer`, and give back what that pins."""
    peers = [n for n in ctx.nodes if n.side == "decode" and n.connector in {"kvreturn", "stock"}]
    stock = [n for n in ctx.nodes if n.side == "prefill" and n.connector == "stock"]
    if peers:
        await asyncio.gather(*(_probe_stock(ctx, node, peers[0]) for node in stock))


async def _probe_stock(ctx: Context, node: Node, peer: Node) -> None:
    answer = await ctx.post(f"http://{node.address}{PATH}", probe_body(node.models[0]))
    form = read_probe(answer.status, answer.body)
    if form is None or node.flags is None:
        return
    node.flags = replace(node.flags, bidirectional=form is Form.STREAMED)
    if form is Form.STREAMED:
        try:
            handle = read_handle(json.dumps(answer.json()[PARAMS]).encode(), split_address(node.address)[0])
        except HandleError:
            return
        # The stock verb: our connector frees only what is proven, and this is not.
        await ctx.post(f"http://{peer.address}{PATH}", free_body(None, handle))
