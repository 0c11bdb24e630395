"""One adapter per API, behind one interface (`kvreturn.core.api.base.API`)."""

from kvreturn.core.api.base import API, Answer, BadRequestError, Prompt
from kvreturn.core.api.chat import Chat
from kvreturn.core.api.completions import Completions
from kvreturn.core.api.messages import Messages
from kvreturn.core.api.responses import Responses

APIS: tuple[API, ...] = (Chat(), Completions(), Responses(), Messages())

__all__ = ["API", "APIS", "Answer", "BadRequestError", "Chat", "Completions", "Messages", "Prompt", "Responses"]
