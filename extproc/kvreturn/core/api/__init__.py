"""One adapter per API, behind one interface (`kvreturn.core.api.base.API`)."""

from kvreturn.core.api.base import API, Answer, BadRequestError, Prompt
from kvreturn.core.api.chat import Chat
from kvreturn.core.api.completions import Completions

APIS: tuple[API, ...] = (Chat(), Completions())

__all__ = ["API", "APIS", "Answer", "BadRequestError", "Chat", "Completions", "Prompt"]
