"""Whether the settings in use are those of the file, and the nodes that Envoy has are the router's."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvreturn.config import Settings
from kvreturn.telemetry.metrics import Metrics


@dataclass(slots=True)
class Freshness:
    """What is not as it should be, until the file is put right or the router is restarted.

    Attributes:
        began: the settings that the router was started with; Envoy's bootstrap was made of the same.
        now: the settings in use.
        held: settings of the file that wait for a restart.
        refused: why the file was not taken when it was last read, None if it was.
        missing: the file that is watched, while it is not there.
    """

    began: Settings
    now: Settings
    held: Sequence[str] = ()
    refused: str | None = None
    missing: Path | None = None

    def tell(self, metrics: Metrics) -> None:
        """Have metrics for it."""
        for name, doc, value in (
            ("restart_needed", "Whether settings in the file wait for a restart.", lambda: bool(self.held)),
            (
                "refused",
                "Whether the file was wrong or missing when it was last looked at: the old settings are in use.",
                lambda: bool(self.refused or self.missing),
            ),
            (
                "envoy_outdated",
                "Whether nodes came or went since the start, while Envoy has its nodes from its bootstrap.",
                lambda: bool(self.unknown_to_envoy()),
            ),
        ):
            metrics.watch(f"config.{name}", doc, value)

    def unknown_to_envoy(self) -> str:
        """The nodes that came and went since Envoy was told, empty if there are none."""
        return moves(self.began, self.now) if self.began.endpoints == "bootstrap" else ""

    def trouble(self) -> list[str]:
        """All of it, in words."""
        found = []
        if self.missing:
            found.append(f"{self.missing} is not there: the settings stay as they are")
        if self.refused:
            found.append(
                f"the changed settings are wrong, and the old ones are in use: {'; '.join(self.refused.splitlines())}"
            )
        if self.held:
            found.append(f"these settings wait for a restart: {', '.join(self.held)}")
        if moved := self.unknown_to_envoy():
            found.append(f"{ENVOY} ({moved})")
        return found


ENVOY = (
    "Envoy does not know that nodes came or went: give it a new bootstrap (`kvreturn envoy-config`) and restart both, "
    "or set envoy.endpoints: router"
)
"""What to do where Envoy has nodes in its bootstrap."""


def moves(old: Settings, new: Settings) -> str:
    """Which nodes came (+) and went (-), as in `decode: +10.0.0.9:8000 -10.0.0.7:8000`; empty if none did."""
    told = []
    for kind, source in new.pools.sources.items():
        before = old.pools.sources[kind].listed
        signed = [f"+{a}" for a in source.listed if a not in before]
        signed += [f"-{a}" for a in before if a not in source.listed]
        if signed:
            told.append(f"{kind}: {' '.join(signed)}")
    return "; ".join(told)
