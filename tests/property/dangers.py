"""Histories that go wrong as soon as one guard is missing, and how to remove that guard.

The random histories found most of them; here they are small, and played at every level.
"""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from kvreturn.core.api import Completions, Prompt
from kvreturn.core.handle import Handle, clipped, direct
from kvreturn.core.jsontext import ObjectText
from kvreturn.core.outcome import Outcome
from kvreturn.core.prefill import PrefillAnswer
from kvreturn.core.turn import Turn as CoreTurn
from kvreturn.sim.connector_kvreturn import KvreturnConnector
from kvreturn.sim.sequence import Sequence
from kvreturn.store.memory import MemoryStore
from property.danger import LONG, TALKS, Danger, Patch
from property.history import Fail, History, Pause, Setup, Talk, Together, Turn
from property.wording import OPTIONS


def _render_again(patch: Patch) -> None:
    """The router has P render the messages, after it compared the tokens that `/tokenize` gave."""
    ask = CoreTurn._ask

    def changed(self: CoreTurn, attached: Any, avoid: str | None, *, last: bool) -> Generator[Any, Any, Any]:  # noqa: ANN401
        return ask(self, attached and replace(attached, prompt=None), avoid, last=last)

    patch.setattr(CoreTurn, "_ask", changed)


def _let_d_render(patch: Patch) -> None:
    """The router does not tell D which tokens P had."""
    params = PrefillAnswer.decode_params
    patch.setattr(PrefillAnswer, "decode_params", lambda self, _, *, keep: params(self, None, keep=keep))


def _compare_no_prompts(patch: Patch) -> None:
    """D takes P's blocks, whatever P says that its prompt was."""
    patch.setattr(KvreturnConnector, "_same_prompt", lambda *_: True)


def _prefill_batches(patch: Patch) -> None:
    """The router has P process several prompts, although P gives one handle."""
    read = Completions.read

    def changed(self: Completions, body: ObjectText, *, strict: bool, longest: int) -> Prompt:
        return replace(read(self, body, strict=strict, longest=longest), alone=None)

    patch.setattr(Completions, "read", changed)


def _load_again(patch: Patch) -> None:
    """D loads P's blocks for each choice of a request."""
    arrived = KvreturnConnector.arrived

    def changed(self: KvreturnConnector, seq: Sequence) -> None:
        if (seq.job.params or {}).get("do_remote_prefill"):
            self._used.clear()
        arrived(self, seq)

    patch.setattr(KvreturnConnector, "arrived", changed)


def _take_again(patch: Patch) -> None:
    """The store keeps a handle that was taken."""
    bury = MemoryStore._bury

    def changed(self: MemoryStore, entry: Any, reason: Outcome) -> None:  # noqa: ANN401 - the store's own
        if reason is not Outcome.ALREADY_TAKEN:
            bury(self, entry, reason)

    patch.setattr(MemoryStore, "_bury", changed)


def _leave_all_blocks(patch: Patch) -> None:
    """The router lowers the count of tokens, and not the list of blocks, which P reads from its end."""

    def changed(handle: Handle, tokens: int) -> bytes:
        blocks = ObjectText(direct(handle)).get("remote_block_ids")
        assert blocks
        return ObjectText(clipped(handle, tokens)).edit(put={"remote_block_ids": blocks})

    patch.setattr("kvreturn.core.attach.clipped", changed)


def _read_what_is_there(patch: Patch) -> None:
    """P reads without D's consent."""
    transfer = KvreturnConnector._transfer

    async def changed(self: KvreturnConnector, *args: Any, held_only: bool = False) -> None:  # noqa: ANN401
        del held_only
        await transfer(self, *args)

    patch.setattr(KvreturnConnector, "_transfer", changed)


_THREE = next(i for i, option in enumerate(OPTIONS) if option.get("n") == 3)
_COLD = Setup(p_cache=False, d_cache=False, talks=TALKS)
_MINUTE = replace(_COLD, template="dated_minute")  # 15 seconds before the end of one
_NARROW = replace(_COLD, p_room=1.0, d_room=1.0)
_OTHERS = (Turn(1, text=LONG), Turn(1, text=LONG), Turn(2, text=LONG), Turn(2, text=LONG))

DANGERS = {
    "the minute ends between /tokenize and P's rendering": Danger(
        History(_MINUTE, (Turn(), Fail("P", "delay"), Turn(), Turn())), "router", _render_again
    ),
    "the minute ends between P's rendering and D's, if D renders": Danger(
        History(
            replace(_MINUTE, pass_token_ids=False), (Turn(), Turn(pause=Pause("between", meanwhile=(16.0,))), Turn())
        ),
        "connector",
        _compare_no_prompts,
    ),
    "the minute ends between P's rendering and D's, and D is told what P had": Danger(
        History(_MINUTE, (Turn(), Turn(pause=Pause("between", meanwhile=(16.0,))), Turn())), "router", _let_d_render
    ),
    "several prompts, and P's blocks of one": Danger(
        History(
            Setup(talks=(Talk("text", system=LONG), Talk("ids", system=LONG))),
            (Turn(), Turn(), Turn(change="batch"), Turn(1), Turn(1, change="batch"), Turn(1)),
        ),
        "off",
        _prefill_batches,
    ),
    "several choices, no room for all at once, and P's blocks that the first has freed": Danger(
        History(
            _NARROW,
            (
                *[Turn(text=LONG)] * 2,
                *[Together((Turn(text=LONG, options=(_THREE,)), Turn(1, text=LONG), Turn(2, text=LONG)))] * 3,
            ),
        ),
        "connector",
        _load_again,
    ),
    "a branch from where the handle was used already": Danger(
        History(_NARROW, (Turn(), Turn(), *_OTHERS[:2], Turn(change="resume", text=3))), "router", _take_again
    ),
    "D holds more than the prompt, which was edited": Danger(
        History(_COLD, (Turn(), Turn(change="regenerate"), Turn(change="edit", at=2))), "router", _leave_all_blocks
    ),
    # A stock P that needs longer for a read than what it allows for it reads what is there: vLLM's own.
    "D gives its blocks away while P is about to read them": Danger(
        History(_NARROW, (Turn(), Turn(at=3, pause=Pause("P", 1, (481.0,), "later")), *_OTHERS)),
        "connector",
        _read_what_is_there,
        levels=("connector",),
    ),
}
