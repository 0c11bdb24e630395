"""Entry point of the group `vllm.general_plugins`: vLLM calls it in each of its processes."""

import logging
import multiprocessing
import os

from kvreturn_connector.compat import ShapeError
from kvreturn_connector.idle import ENV, calm_engine, calm_nixl

logger = logging.getLogger("vllm.kvreturn")
STREAMS_ENV = "KVRETURN_STREAMS"


def register() -> None:
    """Install what belongs into this process. vLLM starts in any case."""
    engine = any(name in multiprocessing.current_process().name for name in ("EngineCore", "Worker"))
    if os.environ.get(ENV) == "1":
        calm_nixl()
        if engine:
            calm_engine()
    if engine or os.environ.get(STREAMS_ENV) == "0":
        return
    from kvreturn_connector.streams import install  # noqa: PLC0415 - pulls in vLLM's API server

    try:
        install()
    except (ShapeError, ImportError) as e:
        logger.error("kvreturn: streamed responses carry no handles: %s", e)  # noqa: TRY400 - the message says it all
