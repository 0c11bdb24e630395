"""The router's metrics. Every label has a bounded set of values; none of them holds what a client wrote."""

import asyncio
from collections.abc import Callable, Collection

from prometheus_client import ProcessCollector, generate_latest

from kvreturn import __version__
from kvreturn.core.outcome import Outcome
from kvreturn.telemetry.instruments import Instruments

_FAST = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_LAGS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_AGES = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 240, 480, 900, 1800)
_MODELS = 32  # models that get a label of their own when none are configured


class Metrics(Instruments):
    """All metrics of one router.

    Args:
        models: names that get a label value of their own, as do the first few others that a node has answered to. What
            is left counts as `other`.
    """

    def __init__(self, models: Collection[str] = ()) -> None:
        super().__init__()
        self._models = set(models)
        self._turns()
        self._handles()
        self._returns()
        self._legs()
        self._process()

    def _turns(self) -> None:
        self.turns = self.counter("turns", "Turns by what became of reuse.", "outcome", "api", "model", unit="{turn}")
        self.incomplete = self.counter(
            "turns_incomplete", "Turns whose response ended before its terminal event.", unit="{turn}"
        )
        self.errors = self.counter(
            "turn_errors", "Turns whose response was an error, or held one, by status or kind.", "type", unit="{turn}"
        )
        self.refused = self.counter(
            "requests_refused", "Requests that were answered with an error from here.", "why", unit="{request}"
        )
        self.prompt_tokens = self.counter("prompt_tokens", "Tokens of all prompts, as P counts them.", unit="{token}")
        self.read_tokens = self.counter(
            "read_back_tokens", "Tokens that P read back from D, as P reports them.", unit="{token}"
        )
        self.computed_tokens = self.counter(
            "computed_tokens", "Tokens of prompts that P computed, where it tells.", unit="{token}"
        )
        self.saved_tokens = self.counter(
            "prefill.saved_tokens",
            "Tokens that P did not compute because they came back from D, in the turn or eagerly before it.",
            unit="{token}",
        )
        self.saved_seconds = self.counter(
            "prefill.saved_seconds", "Time that prefill legs would have taken longer, estimated from other legs."
        )

    def _handles(self) -> None:
        self.captured = self.counter("handles_captured", "Handles taken from responses and stored.", unit="{handle}")
        self.missing = self.counter(
            "handles_missing", "Complete turns whose response brought no handle.", unit="{turn}"
        )
        self.handle_age = self.histogram(
            "handle.age_seconds", "Age of handles when the next turn takes them.", buckets=_AGES
        )
        self.capture_failed = self.counter(
            "capture_failures", "Responses that went on without inspection after a failure.", unit="{response}"
        )
        self.oversize = self.counter(
            "oversize_events", "Events or bodies over the limit; their handles are lost.", unit="{response}"
        )
        self.frees = self.counter(
            "frees", "Requests to free a handle's blocks on D that nobody will read.", "result", unit="{request}"
        )
        self.over_limit = self.counter(
            "sessions_over_limit", "Records that left because their tenant had too many.", unit="{record}"
        )
        self.store_errors = self.counter(
            "store.errors", "Store calls that failed or took too long.", "operation", "kind", unit="{call}"
        )
        self.store_seconds = self.histogram(
            "store.duration_seconds", "Store calls that succeeded.", "operation", buckets=_FAST
        )

    def _returns(self) -> None:
        self.returns = self.counter("returns", "Eager returns by what became of them.", "result", unit="{return}")
        self.return_choices = self.counter(
            "return.choices",
            "Turns whose KV could go back at once, by what was chosen and why.",
            "choice",
            "why",
            unit="{turn}",
        )
        self.recalls = self.counter(
            "return.recalls",
            "Turns that `auto` had left on D, and that were to go back when D ran out of blocks.",
            unit="{turn}",
        )
        self.returned_tokens = self.counter(
            "returned_tokens", "Tokens that P read back in eager returns, as P reports them.", unit="{token}"
        )
        self.return_seconds = self.histogram("return.duration_seconds", "Eager returns.")

    def _legs(self) -> None:
        self.first_token_seconds = self.histogram(
            "time_to_first_token_seconds",
            "From the client's headers to the first byte of content that the client gets.",
            "outcome",
            "streamed",
        )
        self.prefill_seconds = self.histogram("prefill.duration_seconds", "The prefill leg, retries included.")
        self.decode_seconds = self.histogram(
            "decode.duration_seconds", "The decode leg: from the request that goes to D to the end of its answer."
        )
        self.added_seconds = self.histogram(
            "router.added_seconds",
            "What the router itself adds: `request`, to a request, without waiting for P or a return; `response`, to "
            "the whole of a response.",
            "side",
            buckets=_FAST,
        )
        self.streamed = self.counter(
            "answers.streamed", "Streamed answers of turns, by how they pass (docs/lanes.md).", "lane", unit="{answer}"
        )
        self.retries = self.counter("prefill.retries", "Prefill requests that were sent again, cold.", unit="{request}")
        self.fallbacks = self.counter("prefill.fallbacks", "Turns that D did alone.", unit="{turn}")
        self.stranded = self.counter(
            "prefill.blocks_stranded",
            "Turns that ended between P's answer and D's, as far as anybody can tell: P waits for its lease.",
            unit="{turn}",
        )

    def _process(self) -> None:
        self.live = self.gauge("live_streams", "Exchanges that are being processed.", unit="{stream}")
        self.loop_lag = self.histogram(
            "event_loop.lag_seconds", "How late the event loop is, looked at four times a second.", buckets=_LAGS
        )
        self.reloads = self.counter(
            "config.reloads", "Looks at changed settings, by what came of them.", "result", unit="{reload}"
        )
        for result in ("applied", "in_part", "refused", "unchanged"):
            self.reloads.labels(result)  # Prometheus sees no increase in a series that begins with 1
        self.configured = self.gauge(
            "config.last_success_timestamp_seconds", "When the settings in use were read, in seconds since 1970."
        )
        self.watch("tasks", "asyncio tasks of the process.", _tasks, unit="{task}")
        ProcessCollector(registry=self.registry)

    def describe(self, now: Callable[[], tuple[str, ...]]) -> None:
        """Tell how this router is set up.

        Args:
            now: gives the settings `proof` and `return`, the kind of store, and how prefill legs go.
        """
        labels = ("version", "proof", "return", "store", "prefill_via")
        self.watch_each("info", "How the router is set up; always 1.", lambda: {(__version__, *now()): 1.0}, *labels)

    def know(self, models: Collection[str]) -> None:
        """These names get a label value of their own, too."""
        self._models.update(models)

    def turn(self, outcome: Outcome, api: str, model: str, *, served: bool) -> None:
        """Count a turn. If a node `served` it, `model` is a name that exists, and not just what a client wrote."""
        self.turns.labels(outcome.value, api, self._label(model, served=served)).inc()

    def expose(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def value(self, name: str, **labels: str) -> float:
        """The value of one sample, 0 if it is not there yet; for tests and the admin view."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def _label(self, model: str, *, served: bool) -> str:
        if model in self._models:
            return model
        # A lone surrogate, which JSON can hold and UTF-8 cannot, would end the whole page; it is not printable.
        if served and len(self._models) < _MODELS and len(model) <= 128 and model.isprintable():  # noqa: PLR2004
            self._models.add(model)
            return model
        return "other"


def _tasks() -> float:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # scraped where no loop runs
        return 0
