"""Whether the installed vLLM still has the shape that we know. If not: a clear error, and the feature is off."""

import inspect
from collections.abc import Iterable
from typing import Any

_TRIED = "0.32.0"


class ShapeError(RuntimeError):
    """What we build on is not there, or is different."""


def vllm_version() -> str:
    """The version of the installed vLLM."""
    from vllm.version import __version__  # noqa: PLC0415 - vLLM may be absent where this module is only read

    return str(__version__)


def _fail(what: str) -> ShapeError:
    return ShapeError(
        f"vLLM {vllm_version()} differs from what kvreturn_connector was tried with ({_TRIED}): {what}. Use a version "
        "of kvreturn-connector for this vLLM"
    )


def check_generator(owner: type, name: str, argument: str) -> None:
    """Check that `owner.name` is an async generator function that takes `argument`.

    Raises:
        ShapeError: it is not.
    """
    function = getattr(owner, name, None)
    function = inspect.unwrap(function) if function else None
    if not inspect.isasyncgenfunction(function) or argument not in inspect.signature(function).parameters:
        raise _fail(f"{owner.__name__}.{name} is no async generator with an argument `{argument}`")


def check_members(owner: Any, names: Iterable[str]) -> None:
    """Check that a class, or an instance, has these members.

    Raises:
        ShapeError: one is missing.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise _fail(f"{getattr(owner, '__name__', type(owner).__name__)} has no {', '.join(missing)}")


def check_source(function: Any, words: Iterable[str]) -> None:
    """Check that a function still handles the private state that we rely on.

    Raises:
        ShapeError: a word is missing in its source.
    """
    source = inspect.getsource(function)
    missing = [word for word in words if word not in source]
    if missing:
        raise _fail(f"{function.__qualname__} no longer uses {', '.join(missing)}")


def check_connector() -> None:
    """Check vLLM's NIXL connector.

    Raises:
        ShapeError: it has another shape.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import (  # noqa: PLC0415
        NixlBaseConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (  # noqa: PLC0415
        NixlPullConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker  # noqa: PLC0415
    from vllm.v1.request import Request  # noqa: PLC0415

    scheduler, worker = NixlPullConnectorScheduler, NixlPullConnectorWorker
    check_members(
        scheduler,
        ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "request_finished"),
    )
    check_members(
        scheduler, ("update_connector_output", "build_connector_meta", "_nixl_handshake_listener", "shutdown")
    )
    check_members(worker, ("start_load_kv", "get_transfer_results", "_nixl_handshake"))
    check_source(
        scheduler.update_state_after_alloc, ("_remote_blocks_processed", "_reqs_need_recv", "remote_block_ids")
    )
    check_source(scheduler.request_finished, ("_reqs_need_send", "_reqs_not_processed", "remote_num_tokens"))
    check_source(Request.__init__, ("num_computed_tokens", "num_output_placeholders"))
    check_source(worker.start_load_kv, ("_reqs_to_process", "_reqs_to_send", "scheduler_clock"))
    check_source(NixlBaseConnectorScheduler.__init__, ("side_channel_host", "is_bidirectional_kv_xfer_enabled"))
