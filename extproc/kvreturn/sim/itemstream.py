"""The events of a streamed response: items begin, grow and end, one after the other."""

from collections.abc import Iterable

from kvreturn.sim.items import call_item, message_item, new_id, reasoning_item, text_part
from kvreturn.sim.output import Delta, Transcript
from kvreturn.sim.serving import Json


class ItemStream:
    """Makes events of what the model says.

    Args:
        transcript: of the answer.
        reasoning: whether the client gets to see that part.

    Attributes:
        output: the items that have ended.
    """

    def __init__(self, transcript: Transcript, *, reasoning: bool) -> None:
        self.output: list[Json] = []
        self._transcript = transcript
        self._reasoning = reasoning
        self._number = 0  # of the next event
        self._kind = ""  # of the item that is open: that of its deltas, `name` for a call
        self._id = ""
        self._text = ""
        self._call = 0

    def event(self, kind: str, **members: object) -> Json:
        """The next event; its members in vLLM's order, which is that of the alphabet."""
        numbered = {**members, "sequence_number": self._number, "type": f"response.{kind}"}
        self._number += 1
        return dict(sorted(numbered.items()))

    def deltas(self, deltas: Iterable[Delta]) -> list[Json]:
        """The events of pieces of the answer."""
        return [event for delta in deltas for event in self._delta(delta)]

    def close(self) -> list[Json]:
        """End the open item."""
        if not self._kind:
            return []
        done = {"reasoning": self._reasoning_done, "content": self._message_done, "name": self._call_done}[self._kind]
        events, item = done()
        self.output.append(item)
        self._kind = ""
        # The item has its place in the output already: it is the last one.
        return [*events, self.event("output_item.done", item=item, output_index=len(self.output) - 1)]

    def _delta(self, delta: Delta) -> list[Json]:
        if delta.kind == "reasoning" and not self._reasoning:
            return []
        if delta.kind == "arguments":
            self._text += delta.text
            return [self._of_item("function_call_arguments.delta", delta=delta.text)]
        if delta.kind == "name":
            return [*self.close(), *self._begin_call(delta.call)]
        events = [] if delta.kind == self._kind else [*self.close(), *self._begin_text(delta.kind)]
        self._text += delta.text
        if delta.kind == "reasoning":
            return [*events, self._of_part("reasoning_text.delta", delta=delta.text)]
        return [*events, self._of_part("output_text.delta", delta=delta.text, logprobs=[])]

    def _begin_call(self, call: int) -> list[Json]:
        self._kind, self._id, self._text, self._call = "name", new_id("fc"), "", call
        return [self._added(self._call_item("in_progress"))]

    def _begin_text(self, kind: str) -> list[Json]:
        self._kind, self._text = kind, ""
        if kind == "reasoning":
            self._id = new_id("rs")
            item, part = reasoning_item(self._id, None, "in_progress"), {"text": "", "type": "reasoning_text"}
        else:
            self._id = new_id("msg")
            item, part = message_item(self._id, "", "in_progress"), text_part("", [])
        return [self._added(item), self._of_part("content_part.added", part=part)]

    def _reasoning_done(self) -> tuple[list[Json], Json]:
        item = reasoning_item(self._id, self._text, "completed")
        (part,) = item["content"]
        done = self._of_part("reasoning_text.done", text=self._text)
        return [done, self._of_part("content_part.done", part=part)], item

    def _message_done(self) -> tuple[list[Json], Json]:
        part = text_part(self._text)
        done = self._of_part("output_text.done", text=self._text, logprobs=[])
        return [done, self._of_part("content_part.done", part=part)], message_item(self._id, self._text, "completed")

    def _call_done(self) -> tuple[list[Json], Json]:
        item = self._call_item("completed")
        done = self._of_item("function_call_arguments.done", arguments=self._text)
        return [done | {"name": item["name"]}], item

    def _call_item(self, status: str) -> Json:
        call = self._transcript.calls[self._call]
        return call_item(self._id, call.id, call.name, self._text, status)

    def _added(self, item: Json) -> Json:
        return self.event("output_item.added", item=item, output_index=len(self.output))

    def _of_item(self, kind: str, **members: object) -> Json:
        return self.event(kind, item_id=self._id, output_index=len(self.output), **members)

    def _of_part(self, kind: str, **members: object) -> Json:
        return self._of_item(kind, content_index=0, **members)
