"""Simulated vLLM prefill and decode nodes, as dangerous as real ones: for development, demos and fault tests."""

from kvreturn.sim.clock import Clock, ManualClock, RealClock
from kvreturn.sim.config import INSTANT, NO_TIMING, NodeConfig, Timing
from kvreturn.sim.fabric import HttpFabric, LocalFabric
from kvreturn.sim.faults import Fault, Faults
from kvreturn.sim.node import Asked, SimNode, run_node
from kvreturn.sim.stats import BlockUse, NodeStats
from kvreturn.sim.template import TEMPLATES

__all__ = [
    "INSTANT",
    "NO_TIMING",
    "TEMPLATES",
    "Asked",
    "BlockUse",
    "Clock",
    "Fault",
    "Faults",
    "HttpFabric",
    "LocalFabric",
    "ManualClock",
    "NodeConfig",
    "NodeStats",
    "RealClock",
    "SimNode",
    "Timing",
    "run_node",
]
