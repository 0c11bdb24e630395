"""Clients: what they keep of a conversation, what they do to it, and the requests that they make of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvreturn.sim.tokenizer import encode
from property.history import Setup, Style, Talk, Turn
from property.wording import ADAPTER, ALIAS, MODEL, OPTIONS, SYSTEMS, TEXTS, TOOLS, Json
from property.writing import Item, dumps, message_of

_PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions", "ids": "/v1/completions"}
_MODELS = (MODEL, ALIAS, ADAPTER)
_TENANTS: tuple[Mapping[str, str], ...] = ({"authorization": "Bearer one"}, {"authorization": "Bearer two"})


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        path: of it.
        headers: of it.
        body: as sent.
        plain: the same without what a client may not send.
        items: the conversation that it was made from.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes
    plain: bytes
    items: tuple[Item, ...]

    @property
    def stream(self) -> bool:
        return bool(json.loads(self.body).get("stream"))

    @property
    def choices(self) -> int:
        return int(json.loads(self.body).get("n") or 1)


@dataclass
class Conversation:
    """What one client keeps. The methods without an underscore and an argument `turn` are `Turn.change`s."""

    setup: Setup
    talk: Talk
    items: tuple[Item, ...] = ()
    last: Asked | None = None
    past: list[tuple[Item, ...]] = field(default_factory=list)
    _extra: Json = field(default_factory=dict)

    # --- changes ---

    def go_on(self, turn: Turn) -> None:
        """Say more: results for the tools that were called, else a text."""
        text = TEXTS[turn.text]
        if not self.items:
            system = SYSTEMS[self.talk.system]
            self.items = (Item("system", system),) if system else ()
            self.items += (Item("user", text or "Hello."),)
            return
        answer = self.items[-1]
        if answer.role != "assistant":
            return  # the turn failed: ask again
        calls = (answer.answer or {}).get("tool_calls") or ()
        self.items += tuple(Item("tool", text, call=call["id"]) for call in calls) or (Item("user", text),)

    def regenerate(self, turn: Turn) -> None:
        """Ask for the last answer again."""
        if self.items and self.items[-1].role == "assistant":
            self.items = self.items[:-1]
        else:
            self.go_on(turn)

    def resume(self, turn: Turn) -> None:
        """Go back to how things were after an earlier answer, and go on from there."""
        if self.past:
            self.items = self.past[turn.at % len(self.past)]
        self.go_on(turn)

    def edit(self, turn: Turn) -> None:
        """Change an earlier message."""
        if self.items:
            at = turn.at % len(self.items)
            item = self.items[at]
            new = TEXTS[turn.text] if turn.text % 2 else f"{item.text} (edited)"
            answer = None if item.answer is None else {**item.answer, "content": new}
            self.items = (*self.items[:at], replace(item, text=new, answer=answer, ids=()), *self.items[at + 1 :])
        self.go_on(turn)

    def delete(self, turn: Turn) -> None:
        """Leave out an earlier message."""
        if len(self.items) > 2:
            at = turn.at % len(self.items)
            self.items = (*self.items[:at], *self.items[at + 1 :])
        self.go_on(turn)

    def shorten(self, turn: Turn) -> None:
        """Replace the oldest messages by a summary."""
        if len(self.items) > 3:
            self.items = (Item("user", f"Summary: {TEXTS[turn.text]}"), *self.items[2:])
        self.go_on(turn)

    def tools(self, turn: Turn) -> None:
        """Offer other tools."""
        self.talk = replace(self.talk, tools=turn.at % len(TOOLS))
        self.go_on(turn)

    def thinking(self, turn: Turn) -> None:
        """Switch thinking off."""
        self._extra = {"chat_template_kwargs": {"enable_thinking": False}}
        self.go_on(turn)

    def model(self, turn: Turn) -> None:
        """Ask another model."""
        self.talk = replace(self.talk, model=_MODELS[turn.at % len(_MODELS)])
        self.go_on(turn)

    def salt(self, turn: Turn) -> None:
        """Take another cache salt."""
        self.talk = replace(self.talk, salt=(None, "salt", "pepper")[turn.at % 3])
        self.go_on(turn)

    def tenant(self, turn: Turn) -> None:
        """Another tenant says the same."""
        self.talk = replace(self.talk, tenant=1 - self.talk.tenant)
        self.go_on(turn)

    def picture(self, turn: Turn) -> None:
        """Show a picture, or another one in its place: pictures are the same token."""
        shown = [i for i, item in enumerate(self.items) if item.picture]
        self.go_on(turn)
        if self.setup.compares_prompts and self.items[-1].role == "user":
            at = shown[0] if shown else len(self.items) - 1
            new = replace(self.items[at], picture=f"data:image/png;base64,{turn.at}")
            self.items = (*self.items[:at], new, *self.items[at + 1 :])

    def finish_it(self, turn: Turn) -> None:
        """Have the last answer continued."""
        if self.items and self.items[-1].role == "assistant":
            self._extra = {"continue_final_message": True, "add_generation_prompt": False}
        else:
            self.go_on(turn)

    def batch(self, turn: Turn) -> None:
        """Send two prompts in one request, where the API has that."""
        self.go_on(turn)
        self._extra = {"batch": True}

    # --- requests ---

    def ask(self, turn: Turn) -> Asked:
        """The next request."""
        if turn.change == "retry" and self.last:
            return self.last
        getattr(self, "go_on" if turn.change == "retry" else turn.change)(turn)
        extra, self._extra = self._extra, {}
        options: Json = {}
        for index in turn.options:
            options |= OPTIONS[index]
        options = {**options, **extra, "stream": turn.stream}
        for name in self._unwise(turn):
            options.pop(name, None)
        self.last = self._request(turn.style, options)
        return self.last

    def _unwise(self, turn: Turn) -> Iterator[str]:
        """Options that would go wrong without any read-back too; see `Setup`."""
        if not self.setup.compares_prompts:
            yield "echo"  # D then renders the prompt itself, although it was given P's token ids
        if not self.setup.shares_prompts:
            yield "n"
        if not turn.stream:
            yield "stream_options"

    def _request(self, style: Style, options: Json) -> Asked:
        talk = self.talk
        body: Json = {"model": talk.model}
        if talk.salt:
            body["cache_salt"] = talk.salt
        batch = options.pop("batch", False)
        if talk.api == "chat":
            body["messages"] = [message_of(item, style) for item in self.items]
            if talk.tools:
                body["tools"] = list(TOOLS[talk.tools])
        else:
            prompt = self._prompt()
            body["prompt"] = [prompt, prompt[: len(prompt) // 2] + prompt] if batch else prompt
            options = {"return_token_ids": True, "max_tokens": 40} | options
            if options.get("logprobs"):
                options["logprobs"] = 1
        body |= options
        plain = {name: value for name, value in body.items() if name != "kv_transfer_params"}
        if "vllm_xargs" in plain:
            plain["vllm_xargs"] = {"kept": "yes"}
        return Asked(
            _PATHS[talk.api], _TENANTS[talk.tenant], dumps(body, style), dumps(plain, style), tuple(self.items)
        )

    def _prompt(self) -> Any:  # noqa: ANN401 - text or token ids
        if self.talk.api == "text":
            return "".join(item.text if item.role == "assistant" else f"\n{item.text}\n" for item in self.items)
        ids: list[int] = []
        for item in self.items:
            ids += item.ids or encode(f"\n{item.text}\n")
        return ids

    def refused(self) -> None:
        """The request was not accepted; most likely the conversation has become too long."""
        self.items = self.past[0] if self.past else ()

    def answered(self, asked: Asked, answer: "Answer") -> None:
        """The answer is here."""
        last = asked.items[-1]
        if json.loads(asked.body).get("continue_final_message") and last.role == "assistant":
            message = {**(last.answer or {}), "content": last.text + answer.text}
            self.items = (*asked.items[:-1], replace(last, text=message["content"], answer=message, ids=()))
        else:
            item = Item("assistant", answer.text, answer.message, tuple(answer.ids))
            self.items = (*asked.items, item)
        self.past.append(self.items)


@dataclass(frozen=True)
class Answer:
    """An answer as the client took it: its last choice.

    Attributes:
        text: content, or the completion's text.
        message: of the chat API.
        ids: tokens, where the node told them.
    """

    text: str
    message: Json | None = None
    ids: Sequence[int] = ()
