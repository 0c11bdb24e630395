"""The fast lane in a bootstrap: what Envoy accepts, but what makes turns cold, or answers broken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvreturn.envoy.lint import lint

Doc = dict[str, Any]
_SHIPPED = (Path(__file__).parents[3] / "envoy/gateway-fast-lane.yaml").read_text()
_READY, _HOLDING, _EXT_PROC, _GUARD, _PASSING, _ROUTER = range(6)


def chain(doc: Doc) -> list[Doc]:
    """The client listener's HTTP filters."""
    listener = doc["static_resources"]["listeners"][0]
    filters: list[Doc] = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    return filters


def ext_proc(doc: Doc) -> Doc:
    config: Doc = chain(doc)[_EXT_PROC]["typed_config"]
    return config


def move(of: int, to: int) -> Callable[[Doc], object]:
    return lambda doc: chain(doc).insert(to, chain(doc).pop(of))


def without_cluster(doc: Doc) -> None:
    clusters = doc["static_resources"]["clusters"]
    clusters[:] = [c for c in clusters if "@" not in c["name"]]


BREAKS: dict[str, tuple[Callable[[Doc], object], str]] = {
    "hand_over.lua behind ext_proc": (move(_HOLDING, _GUARD), "before ext_proc"),
    "fast_lane.lua before ext_proc": (move(_PASSING, 0), "put it behind"),
    "no hand_over.lua": (lambda doc: chain(doc).pop(_HOLDING), "take both, or none"),
    "no fast_lane.lua": (lambda doc: chain(doc).pop(_PASSING), "take both, or none"),
    "metadata not forwarded": (lambda doc: ext_proc(doc)["metadata_options"].pop("forwarding_namespaces"), "goes cold"),
    "no mode override": (lambda doc: ext_proc(doc).pop("allow_mode_override"), "allow_mode_override"),
    "no cluster of one router": (without_cluster, "nobody"),
}


@pytest.mark.parametrize(("change", "words"), BREAKS.values(), ids=BREAKS)
def test_what_breaks_the_fast_lane_is_found(change: Callable[[Doc], object], words: str) -> None:
    doc = yaml.safe_load(_SHIPPED)
    change(doc)
    (problem,) = lint(doc)
    assert problem.rule == "p-fast-lane"
    assert words in problem.what


def test_a_chain_without_either_script_is_the_portable_lane() -> None:
    doc = yaml.safe_load(_SHIPPED)
    del chain(doc)[_PASSING], chain(doc)[_HOLDING]
    assert lint(doc) == []
