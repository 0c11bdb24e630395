"""Histories with eager returns that go wrong as soon as one guard is missing, and how to remove that guard."""

from dataclasses import replace
from typing import Any

from kvreturn.core.api import Chat, Prompt
from kvreturn.core.jsontext import ObjectText
from kvreturn.core.ports import Ask, Reply
from kvreturn.core.returning import Form, Job
from kvreturn.server import returns
from kvreturn.server.freeing import ask
from kvreturn.server.world import World
from kvreturn.store.memory import MemoryStore
from kvreturn.upstream.forms import Forms
from property.danger import LONG, TALKS, Danger, Patch
from property.history import Away, Back, History, SecondP, Setup, Turn
from property.verdict import PoisonedCacheError
from property.wording import OPTIONS


def _take_all_for_streamed(patch: Patch) -> None:
    """The router asks no P what it is: each has the flag."""
    patch.setattr(Forms, "form", lambda *_: Form.STREAMED)


def _take_all_for_loaded(patch: Patch) -> None:
    """The router asks no P what it is: none has the flag."""
    patch.setattr(Forms, "form", lambda *_: Form.LOADED)


def _leave_the_handle(patch: Patch) -> None:
    """A return does not take its handle from the store."""

    async def changed(*_: Any) -> bool:  # noqa: ANN401 - not looked at
        return True

    patch.setattr(MemoryStore, "replace", changed)


def _send_to_any(patch: Patch) -> None:
    """A return goes to another P if the right one is away, as turns do."""

    async def changed(world: World, question: Ask, *rest: Any) -> Reply:  # noqa: ANN401 - as they are
        return await ask(world, replace(question, only=False), *rest)

    patch.setattr(returns, "ask", changed)


def _believe_tokens(patch: Patch) -> None:
    """The router returns what P names as its prompt, pictures or not, and does not compare that with D's digests."""
    patch.setattr(Job, "_are_these", lambda *_: True)
    read = Chat.read

    def changed(self: Chat, body: ObjectText, *, strict: bool, longest: int) -> Prompt:
        return replace(read(self, body, strict=strict, longest=longest), identifiable=True)

    patch.setattr(Chat, "read", changed)


_EAGER = Setup(talks=TALKS)
_SMALL = replace(_EAGER, p_room=1.0, d_room=1.0)
_WHOLE = Turn(stream=False, text=LONG)  # a stock D has no handle in its streams
_SHOWN = Turn(change="picture", at=1, options=(next(i for i, o in enumerate(OPTIONS) if "return_token_ids" in o),))
_OTHERS = (Turn(1, text=LONG), Turn(1, text=LONG), Turn(2, text=LONG), Turn(2, text=LONG))

RETURN_DANGERS = {
    "a P without the flag that is asked to read as one with it": Danger(
        History(_EAGER, (_WHOLE, _WHOLE)),
        "eager, all stock, P without the flag",
        _take_all_for_streamed,
        error=AssertionError,
        says="a request hangs on P",
    ),
    "a P with the flag that is asked to load as one without it": Danger(
        History(_EAGER, (_WHOLE, _WHOLE)),
        "eager, all stock",
        _take_all_for_loaded,
        error=AssertionError,
        says="P pins blocks for nobody",
    ),
    "a turn that comes before a return, and both have the handle": Danger(
        History(_SMALL, (Turn(text=LONG, at=3, back=Back("sent", 2, then="later")), Turn(), *_OTHERS)),
        "eager, router",
        _leave_the_handle,
        error=PoisonedCacheError,
    ),
    "the P of a return is away, and another one is not its like": Danger(
        History(
            replace(_EAGER, p2=SecondP("stock", flag=False)),
            (_WHOLE, replace(_WHOLE, back=Back("queue", then="later")), Away("P")),
        ),
        "eager, all stock",
        _send_to_any,
        error=AssertionError,
        says="a request hangs on P2",
    ),
    "two pictures, which are the same token": Danger(
        History(_SMALL, (Turn(), _SHOWN, *_OTHERS, replace(_SHOWN, at=2))),
        "eager, router",
        _believe_tokens,
        error=PoisonedCacheError,
    ),
}
