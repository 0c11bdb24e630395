"""Takes token ids out of an answer to which they were added for our own use.

A request with `return_token_ids` gets, where there would be null, the ids of the prompt (chat: beside the choices;
completions: in each) and of what was generated (in each choice).
"""

from typing import Literal

from kvreturn.core.jsontext import JSONTextError, ObjectText, loads

_PROMPT, _GENERATED = "prompt_token_ids", "token_ids"
TokenIds = tuple[bytes, list[int]]
Ids = Literal["hidden", "shown"]
"""Whether ids in an answer were asked for here, and must not go on, or by the client."""


def take_ids(text: bytes) -> tuple[bytes, TokenIds | None]:
    """The body of an answer with one choice as it would be without them, and the ids.

    Returns:
        The text, and the ids: of the prompt as raw JSON list, of the answer. None if they are not both there.

    Raises:
        JSONTextError: no JSON object.
    """
    body = ObjectText(text)
    choices = (body.get("choices") or b"").strip()
    try:
        choice = ObjectText(choices[1:-1].strip())
    except JSONTextError:
        return body.edit(put=_nulls(body)), None
    prompt = next((p for p in (body.get(_PROMPT), choice.get(_PROMPT)) if p and p[:1] == b"["), None)
    generated = loads(choice.get(_GENERATED) or b"null")
    stripped = body.edit(put={**_nulls(body), "choices": b"[" + choice.edit(put=_nulls(choice)) + b"]"})
    return stripped, (prompt, generated) if prompt and isinstance(generated, list) else None


def _nulls(obj: ObjectText) -> dict[str, bytes]:
    return {name: b"null" for name in (_PROMPT, _GENERATED) if name in obj}
