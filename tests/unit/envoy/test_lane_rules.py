"""The fast lane in a bootstrap: what Envoy accepts, but what makes turns cold, or answers broken."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvreturn.envoy.lane_rules import has_scripts
from kvreturn.envoy.lint import lint

Doc = dict[str, Any]
_SHIPPED = (Path(__file__).parents[3] / "envoy/gateway.yaml").read_text()
_READY, _HOLDING, _EXT_PROC, _PASSING, _ROUTER = range(5)


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


def source(doc: Doc) -> Doc:
    """Where the script is that guards the node and passes answers: one filter does both."""
    code: Doc = chain(doc)[_PASSING]["typed_config"]["default_source_code"]
    return code


def guard_only(doc: Doc) -> None:
    guard, _, _ = source(doc)["inline_string"].partition("local EVENT_BYTES")
    source(doc)["inline_string"] = guard


def passes_early(doc: Doc) -> None:
    """The guard stays where it was."""
    early = copy.deepcopy(chain(doc)[_PASSING])
    guard_only(doc)
    code = early["typed_config"]["default_source_code"]
    code["inline_string"] = code["inline_string"].removeprefix(source(doc)["inline_string"])
    chain(doc).insert(0, early)


def without_cluster(doc: Doc) -> None:
    clusters = doc["static_resources"]["clusters"]
    clusters[:] = [c for c in clusters if "@" not in c["name"]]


def without_log(doc: Doc) -> None:
    listener = doc["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["access_log"] = [log for log in manager["access_log"] if "grpc" not in log["name"]]


def trailers(doc: Doc) -> None:
    (decode,) = (c for c in doc["static_resources"]["clusters"] if c["name"] == "decode")
    (options,) = decode["typed_extension_protocol_options"].values()
    options["explicit_http_config"]["http_protocol_options"] = {"enable_trailers": True}


BREAKS: dict[str, tuple[Callable[[Doc], object], str]] = {
    "hand_over.lua behind ext_proc": (move(_HOLDING, _EXT_PROC), "before ext_proc"),
    "fast_lane.lua before ext_proc": (passes_early, "put it behind"),
    "no hand_over.lua": (lambda doc: chain(doc).pop(_HOLDING), "take both, or none"),
    "no fast_lane.lua": (guard_only, "take both, or none"),
    "metadata not forwarded": (lambda doc: ext_proc(doc)["metadata_options"].pop("forwarding_namespaces"), "goes cold"),
    "no mode override": (lambda doc: ext_proc(doc).pop("allow_mode_override"), "allow_mode_override"),
    "no cluster of one router": (without_cluster, "nobody"),
    "no log of what ends": (without_log, "stay open"),
    "a node's trailers": (trailers, "enable_trailers"),
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
    assert has_scripts(doc)
    guard_only(doc)
    del chain(doc)[_HOLDING]
    assert lint(doc) == []
    assert not has_scripts(doc)
