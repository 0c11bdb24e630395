"""Prometheus metrics. Every label has a bounded set of values; none of them holds what a client wrote."""

from collections.abc import Callable, Collection, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from kvreturn.core.outcome import Outcome

disable_created_metrics()  # type: ignore[no-untyped-call] # a second series for every counter, which nobody reads
_FAST = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_MODELS = 32  # models that get a label of their own when none are configured


class Metrics:
    """All metrics of one router.

    Args:
        models: names that get a label value of their own, as do the first few others that a node has answered to. What
            is left counts as `other`.
    """

    def __init__(self, models: Collection[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self._models = set(models)

        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(f"kvreturn_{name}", doc, labels, registry=self.registry)

        def histogram(name: str, doc: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(f"kvreturn_{name}", doc, labels, buckets=buckets, registry=self.registry)

        self.turns = counter("turns", "Turns by what became of reuse.", "outcome", "api", "model")
        self.incomplete = counter("turns_incomplete", "Turns whose response ended before its terminal event.")
        self.errors = counter("turn_errors", "Turns whose response was an error, or held one.", "type")
        self.read_tokens = counter("read_back_tokens", "Tokens that P read back from D, as P reports them.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of all prompts, as P counts them.")
        self.returns = counter("returns", "Eager returns by what became of them.", "result")
        self.return_choices = counter(
            "return_choices", "Turns whose KV could go back at once, by what was chosen and why.", "choice", "why"
        )
        self.recalls = counter(
            "return_recalls", "Turns that `auto` had left on D, and that were to go back when D ran out of blocks."
        )
        self.saved_seconds = counter(
            "prefill_saved_seconds", "Time that prefill legs would have taken longer, estimated from other legs."
        )
        self.returned_tokens = counter(
            "returned_tokens", "Tokens that P read back in eager returns, as P reports them."
        )
        self.return_seconds = histogram("return_duration_seconds", "Eager returns.")
        self.frees = counter("frees", "Requests to free a handle's blocks on D that nobody will read.", "result")
        self.retries = counter("prefill_retries", "Prefill requests that were sent again, cold.")
        self.fallbacks = counter("prefill_fallbacks", "Turns that D did alone.")
        self.stranded = counter(
            "prefill_blocks_stranded", "Clients that left between P's answer and D's request: P waits for its lease."
        )
        self.captured = counter("handles_captured", "Handles taken from responses and stored.")
        self.missing = counter("handles_missing", "Complete turns whose response brought no handle.")
        self.capture_failed = counter("capture_failures", "Responses that went on without inspection after a failure.")
        self.oversize = counter("oversize_events", "Events or bodies over the limit; their handles are lost.")
        self.refused = counter("requests_refused", "Requests that were answered with an error from here.", "why")
        self.over_limit = counter("sessions_over_limit", "Records that left because their tenant had too many.")
        self.store_errors = counter("store_errors", "Store calls that failed or took too long.", "operation", "kind")
        self.store_seconds = histogram(
            "store_duration_seconds", "Store calls that succeeded.", "operation", buckets=_FAST
        )
        self.prefill_seconds = histogram("prefill_duration_seconds", "The prefill leg, retries included.")
        self.first_byte_seconds = histogram(
            "time_to_first_byte_seconds", "From the client's headers to the first byte of D's body.", "outcome"
        )
        self.reloads = counter("config_reloads", "Looks at changed settings, by what came of them.", "result")
        self.configured = Gauge(
            "kvreturn_config_last_success_timestamp_seconds",
            "When the settings in use were read, in seconds since 1970.",
            registry=self.registry,
        )
        self.live = Gauge("kvreturn_live_streams", "Exchanges that are being processed.", registry=self.registry)

    def know(self, models: Collection[str]) -> None:
        """These names get a label value of their own, too."""
        self._models.update(models)

    def watch(self, name: str, doc: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is asked for at each scrape."""
        Gauge(f"kvreturn_{name}", doc, registry=self.registry).set_function(value)

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
        if served and len(self._models) < _MODELS and len(model) <= 128:  # noqa: PLR2004
            self._models.add(model)
            return model
        return "other"
