"""One conversation of two turns through the gateway, as a client's: is the second one a hit, and is nothing leaked?

It has a tenant of its own, so it meets nobody's sessions; and its second turn asks for two choices, after which the
decode node keeps nothing, so it leaves no pin.
"""

import asyncio
import json
import re
import secrets
from collections import Counter
from collections.abc import Mapping

from kvreturn.core.arrival import ARRIVED
from kvreturn.core.handle import PARAMS
from kvreturn.core.returning import PATH
from kvreturn.doctor.context import OK, Answer, Context
from kvreturn.doctor.model import Finding, fail, ok, skipped, warn
from kvreturn.doctor.pair import DECODE
from kvreturn.envoy.ports import reachable

CHECK = "gateway"
_SETTLE = 0.4  # of a check's time, until the router has counted a turn whose answer is here
_LOOK = 0.05
_ANSWER = 104  # tokens: more than P reads at least
_SAMPLE = re.compile(r"^kvreturn_(turns_total|returns_total)\{(.*)\} (\S+)$", re.MULTILINE)
_LEAK = re.compile(rb'"%s"\s*:\s*[^\sn]' % PARAMS.encode())  # vLLM itself writes null there
_LABEL = re.compile(r'(outcome|result)="([^"]*)"')
_GOOD = {"hit", "partial_hit", "returned", "local_hit"}
_REMEDIES = {
    "no_handle_from_decode": "see the check `streams`",
    "unproven": "see the checks `proof`, `flags.secret` and `flags.block_size`",
    "not_a_continuation": "the two nodes render prompts differently: run the same model and tokenizer on both",
    "expired": "raise store.ttl: the handle did not live for a second",
    "below_threshold": "lower kv_recompute_threshold on the prefill node, or limits.min_tokens",
    "store_unavailable": "see the check `store`",
    "node_gone": "see the checks `side_channel` and `proof`; with several decode nodes, `envoy.nodes`",
    "breaker_open": "reads of this decode engine failed lately: see the check `proof`, and the prefill node's log",
    "disabled": "set proof to `connector`, if that is not meant",
    "prefill_failed": "see the checks `node.health` and `envoy`: the router reaches no prefill node",
    "evicted": "the prefill node's prefix cache is too small for what goes back to it",
    "return_failed": "look into the prefill node's log; see the check `eager_return`",
    "read_failed": "look into the prefill node's log; see the check `transport`",
    "slower": "reading takes longer than computing: see the check `transport`",
    "first_turn": "the router did not know its own turn again: do all routers share a store and a secret?",
}

Counts = Mapping[str, float]


async def probe_gateway(ctx: Context) -> list[Finding]:
    """Play the conversation."""
    served = [n.models for n in ctx.nodes if n.models]
    common = [m for m in served[0] if all(m in others for others in served)] if served else []  # base models come first
    if not common:
        return [skipped(CHECK, "no model is known that all nodes serve")]
    model, before = common[0], await _counts(ctx)
    start = f"kvreturn doctor {secrets.token_hex(8)}. " + " ".join(f"Line {i} of a probe." for i in range(24))
    first = await _ask(ctx, model, start, _ANSWER, choices=1)
    findings = _served(ctx, first)
    if not findings:
        return_findings = await _eager(ctx, model, before)
        text = _text(first.body)
        second = await _ask(ctx, model, f"{start}{text} And then?", 1, choices=2)
        findings = _served(ctx, second) or [
            ok(CHECK, f"two turns in {first.seconds:.2f} and {second.seconds:.2f} s, no handle in what a client sees"),
            await _outcome(ctx, before),
        ]
        findings += return_findings
    return findings


async def _ask(ctx: Context, model: str, prompt: str, tokens: int, *, choices: int) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0 if choices == 1 else 1,  # vLLM refuses several choices of greedy sampling
        "ignore_eos": True,
        "n": choices,
        "stream": choices == 1,
    }
    headers = {}
    if ctx.settings.tenant_header:
        headers[ctx.settings.tenant_header] = "kvreturn-doctor"
    elif "authorization" not in {name.lower() for name in ctx.headers}:
        headers["authorization"] = "Bearer kvreturn-doctor"  # a tenant of its own
    return await ctx.post(f"{ctx.gateway}{PATH}", json.dumps(body).encode(), headers, times=DECODE)


def _served(ctx: Context, answer: Answer) -> list[Finding]:
    """What is wrong with an answer, if anything is."""
    if answer.status in {401, 403}:
        remedy = "give --api-key, or the headers that your auth filter wants by --header"
        return [fail(CHECK, f"the gateway refuses the probe: {answer.what}", remedy)]
    if answer.status != OK:
        remedy = "are Envoy, the router and the nodes running? see the checks `envoy`, `router` and `node.health`"
        if not answer.status:
            remedy = "start Envoy; if it is elsewhere, give --gateway URL"
        return [fail(CHECK, f"{ctx.gateway}{PATH}: {answer.what}", remedy)]
    if _LEAK.search(answer.body):
        remedy = "requests reach the nodes past the router: see the check `envoy.lint`"
        return [fail(CHECK, f"the client gets {PARAMS}", remedy)]
    return []


def _text(body: bytes) -> str:
    pieces = []
    for line in body.split(b"\n"):
        event = Answer(body=line.removeprefix(b"data:").strip()).json()
        if isinstance(event, dict) and event.get("choices"):
            pieces.append(str(event["choices"][0].get("text") or ""))
    return "".join(pieces)


async def _counts(ctx: Context) -> Counts | None:
    """The counters of all workers: turns by outcome, and returns by result with `return ` before it."""
    admins = [admin for i in range(ctx.settings.workers) if (admin := ctx.settings.worker(i).admin)]
    answers = await asyncio.gather(*(ctx.get(f"http://{reachable(admin)}/metrics") for admin in admins))
    if not answers or any(answer.status != OK for answer in answers):
        return None
    totals = dict[str, float]()
    for family, labels, value in _SAMPLE.findall("".join(a.body.decode(errors="replace") for a in answers)):
        label = _LABEL.search(labels)
        if label:
            name = f"return {label[2]}" if family == "returns_total" else label[2]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


async def _grown(ctx: Context, before: Counts, number: int, *, returns: bool) -> dict[str, int]:
    """What was counted since, once it is so many or they are long enough in coming."""
    waited = 0.0
    while True:
        now = await _counts(ctx) or {}
        grown = {
            name.removeprefix("return "): int(value - before.get(name, 0))
            for name, value in now.items()
            if value > before.get(name, 0) and name.startswith("return ") is returns
        }
        if sum(grown.values()) >= number or waited >= _SETTLE * ctx.seconds:
            return grown
        await asyncio.sleep(_LOOK)
        waited += _LOOK


async def _outcome(ctx: Context, before: Counts | None) -> Finding:
    check = "gateway.outcome"
    if before is None:
        return skipped(check, "the router's metrics cannot be read", remedy="set `admin`, and run this on its machine")
    grown = await _grown(ctx, before, 2, returns=False)
    if not grown:
        return skipped(check, "this router counted no turn: another one had them", remedy="run this for each router")
    told = ", ".join(f"{name} {number}" for name, number in sorted(grown.items()))
    rest = Counter(grown)
    rest["first_turn" if "first_turn" in grown else next(iter(grown))] -= 1
    ends = +rest
    if sum(ends.values()) != 1:
        if ends.keys() <= _GOOD | {"first_turn"} and ends.keys() & _GOOD:
            return ok(check, f"all turns went well, others' of the same moment among them ({told})")
        why = f"other turns of the same moment cannot be told from the probe's ({told})"
        return skipped(check, why, remedy="run it again when there is less traffic")
    (end,) = ends
    if end == "hit":
        return ok(check, "the second turn is a hit")
    if end in _GOOD:
        return ok(check, f"the second turn is a {end}: reuse works, if not of the whole")
    if end == "disabled":
        return warn(check, "`proof: off`: nothing is read back lazily", _REMEDIES[end])
    remedy = _REMEDIES.get(end, "the README says what this outcome means")
    return fail(check, f"the second turn is no hit: {end}", remedy)


async def _eager(ctx: Context, model: str, before: Counts | None) -> list[Finding]:
    """Whether the first turn went back by itself."""
    check, mode = "eager_return", ctx.settings.return_for(model)
    if mode == "lazy":
        return []
    if before is None:
        return [skipped(check, "the router's metrics cannot be read", remedy="set `admin`, and run this there")]
    grown = await _grown(ctx, before, 1, returns=True)
    told = ", ".join(sorted(grown))
    if grown.keys() & ARRIVED:
        return [ok(check, f"the first turn went back at once ({told})")]
    if not grown and mode == "auto":
        return [ok(check, "`auto` left the probe's turn on the decode node")]
    what = f"nothing went back at once ({told or 'no return was counted'})"
    remedy = "see the checks `streams` and `flags.secret`; kvreturn.return in the router's log tells more"
    return [warn(check, what, remedy) if mode == "auto" else fail(check, what, remedy)]
