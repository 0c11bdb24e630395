"""`POST /v1/completions`."""

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvreturn.core.api.base import (
    API,
    HISTORY,
    Answer,
    BadRequestError,
    Prompt,
    load,
    prefill_edit,
    read_common,
    read_model,
    shaping,
    shaping_names,
)
from kvreturn.core.api.choices import ChoicesAnswer, say
from kvreturn.core.fingerprint import Trail, segments
from kvreturn.core.jsontext import ObjectText

# A prompt without messages has no boundaries of its own, so items are pieces of this many bytes of text, or token ids
# times four. A shorter prompt has no item: it is below any useful threshold for a read.
_SEGMENT = 256
_TOKENIZE_SAFE = frozenset({"model", "prompt", "cache_salt"})
# What a prompt of token ids keeps of a request to any API: whose KV it is, and vLLM's order of scheduling.
_KEPT = frozenset({"model", "cache_salt", "priority"})


def prefill_tokens(body: ObjectText, tokens: Sequence[int], params: bytes) -> bytes:
    """The P leg's body for just these tokens, whichever API the client's `body` is for.

    P would render messages once more, later than its `/tokenize` did: with a date in the template, another prompt.
    """
    others = {m.name for m in body.members} - _KEPT
    prompt = json.dumps(tokens, separators=(",", ":")).encode()
    return prefill_edit(body, params, ("max_tokens",), {"prompt": prompt}, others)


class Completions(API):
    """The prompt is text or token ids; the next one begins with the prompt and the answer of this one."""

    name = "completions"
    path = "/v1/completions"
    begun = re.compile(rb'"text": ?"[^"]')
    tokenize = ("model", "prompt", "add_special_tokens")

    def read(self, body: ObjectText, *, strict: bool, longest: int = HISTORY) -> Prompt:
        """See `API.read`."""
        del longest  # a prompt has no messages
        prompt = _prompt(body)
        model, (choices, stream) = read_model(body), read_common(body)
        root: list[Any] = [self.name, model, body.load("cache_salt"), isinstance(prompt, str)]
        if strict:
            root.append(shaping(body, ("model", "prompt", "cache_salt")))
        batch = isinstance(prompt, list) and not _is_ids(prompt)
        plain = shaping_names(body) <= _TOKENIZE_SAFE  # nothing else, such as `truncate_prompt_tokens`, changes it
        return Prompt(
            model=model,
            root=root,
            items=[] if batch else segments(_octets(prompt), _SEGMENT),
            has_answer=False,
            choices=max(choices, 2) if batch else choices,
            stream=stream,
            tokenizable=isinstance(prompt, str) and plain,
            tokens=prompt if isinstance(prompt, list) and not batch and plain else None,
            identifiable=not batch and "prompt_embeds" not in body,
            # P's handle is that of one prompt, and D would load its blocks for all of them.
            alone="several_prompts" if batch and len(prompt) > 1 else None,
        )

    def prefill_body(self, body: ObjectText, params: bytes, *, ids: bool) -> bytes:
        """See `API.prefill_body`."""
        return prefill_edit(body, params, ("max_tokens",), {"return_token_ids": b"true"} if ids else {})

    def extend(self, prompt: Trail, body: ObjectText, answer: Answer, *, strict: bool) -> Trail | None:
        """See `API.extend`.

        Under `strict` never: the last piece is not whole, so equality cannot be told. Nor with `echo`, where the answer
        repeats the prompt.
        """
        text = _prompt(body)
        if strict or not isinstance(text, str) or not isinstance(answer, CompletionsAnswer) or body.load("echo"):
            return None
        rest = _octets(text)[prompt.depth * _SEGMENT :] + "".join(answer.text).encode(errors="surrogatepass")
        return prompt.extend(segments(rest, _SEGMENT))

    def answer(self) -> Answer:
        """See `API.answer`."""
        return CompletionsAnswer()


@dataclass(slots=True)
class CompletionsAnswer(ChoicesAnswer):
    """The text of the first choice."""

    text: list[str] = field(default_factory=list)

    def read_choice(self, choice: Mapping[str, Any], *, stream: bool) -> None:
        """See `Answer.read_choice`."""
        del stream
        if isinstance(choice.get("text"), str):
            say(self.text, choice["text"])

    def items(self, *, strict: bool) -> Sequence[bytes] | None:
        """See `Answer.items`. The answer alone ends at no boundary; `Completions.extend` puts it together."""
        del strict
        return None


def _prompt(body: ObjectText) -> Any:  # noqa: ANN401 - JSON
    prompt = load(body, "prompt")
    if not isinstance(prompt, str | list) or not prompt:
        raise BadRequestError("`prompt` must be a text or a list of token ids")
    return prompt


def _is_ids(prompt: list[Any]) -> bool:
    return all(type(t) is int and 0 <= t < 2**32 for t in prompt)


def _octets(prompt: str | list[int]) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass")
    return array("I", prompt).tobytes()
