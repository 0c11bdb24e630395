"""Opt-in for small machines: what makes NIXL and vLLM spin while nothing happens.

NIXL's Python API makes its progress thread poll without pause: one whole core per worker. And an engine that has only
finished requests left, whose blocks wait to be read, steps without pause. Both are right where cores are plenty, and
starve everything where there are two. `KVRETURN_CALM_IDLE=1` turns them down.
"""

import time
from typing import Any

ENV = "KVRETURN_CALM_IDLE"
_MARK = "_kvreturn"
_STEP = "_process_engine_step"
_POLL_US = 10_000  # NIXL's progress thread wakes at once for traffic; this is its pause without any
_PAUSE = 0.01  # seconds between steps of an engine that only waits for readers
_SPIN = 0.005  # seconds that a worker spins for the next message before it sleeps
_WAKE_MS = 20  # a lost wake-up costs this much; vLLM's own limit is 5 s


def calm_nixl() -> None:
    """Give NIXL's progress thread a pause."""
    try:
        from nixl_cu12 import _api as api  # noqa: PLC0415
    except ImportError:
        from nixl import _api as api  # noqa: PLC0415
    bind: Any = api.nixlBind
    config: Any = bind.nixlAgentConfig
    if getattr(config, "_kvreturn", False):
        return

    class CalmConfig(config):
        _kvreturn = True

        @property
        def pthrDelay(self) -> int:  # noqa: N802 - NIXL's name
            return int(config.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, value: int) -> None:  # noqa: N802
            config.pthrDelay.__set__(self, max(value, _POLL_US))

    bind.nixlAgentConfig = CalmConfig


def calm_engine() -> None:
    """Give vLLM's engine and workers a pause while nothing runs."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415

    if getattr(EngineCoreProc, _MARK, False):
        return
    setattr(EngineCoreProc, _MARK, True)
    step, wait = getattr(EngineCoreProc, _STEP), SpinCondition.wait

    def calm_step(self: Any) -> Any:
        executed = step(self)
        scheduler = self.scheduler
        if not executed and scheduler.has_requests() and not scheduler.has_unfinished_requests():
            time.sleep(_PAUSE)
        return executed

    def calm_wait(self: Any, timeout_ms: float | None = None) -> Any:
        return wait(self, _WAKE_MS if timeout_ms is None else min(timeout_ms, _WAKE_MS))

    setattr(EngineCoreProc, _STEP, calm_step)
    SpinCondition.__init__.__defaults__ = (_SPIN,)
    SpinCondition.wait = calm_wait
