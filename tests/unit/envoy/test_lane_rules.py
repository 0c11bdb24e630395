"""The fast lane in a bootstrap: what Envoy accepts, but what makes turns cold, or answers broken."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvreturn.config import Settings
from kvreturn.envoy.bootstrap import build, to_dict
from kvreturn.envoy.lint import lint
from kvreturn.envoy.scripts import has_scripts

Doc = dict[str, Any]
Change = Callable[[Doc], object]
_READY, _HOLDING, _EXT_PROC, _PASSING, _ROUTER = range(5)
_PLAIN_ROUTE, _TURNS_ROUTE = 1, 2
A, B = "10.0.0.8:9090", "10.0.0.9:9090"
_POOLS = {"prefill": ["10.0.0.1:8000"], "decode": ["10.0.0.3:8000", "10.0.0.4:8000"]}


_ONE: Doc = {}
_TWO: Doc = {"routers": [A, B]}


def made(envoy: Doc) -> Doc:
    """The bootstrap for these settings of Envoy, to be changed at will."""
    doc: Doc = json.loads(_made(json.dumps(envoy)))
    return doc


@functools.cache  # each takes a tenth of a second
def _made(envoy: str) -> str:
    settings = Settings.model_validate({"pools": _POOLS, "envoy": json.loads(envoy)})
    return json.dumps(to_dict(build(settings)))


def manager(doc: Doc) -> Doc:
    """The client listener's."""
    config: Doc = doc["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return config


def chain(doc: Doc) -> list[Doc]:
    filters: list[Doc] = manager(doc)["http_filters"]
    return filters


def wrapper(doc: Doc) -> Doc:
    config: Doc = chain(doc)[_EXT_PROC]["typed_config"]
    return config


def ext_proc(doc: Doc) -> Doc:
    config: Doc = wrapper(doc)["extension_config"]["typed_config"]
    return config


def rule(doc: Doc) -> Doc:
    """When ext_proc is left out."""
    (one,) = wrapper(doc)["xds_matcher"]["matcher_list"]["matchers"]
    found: Doc = one
    return found


def unwrap(doc: Doc) -> None:
    chain(doc)[_EXT_PROC]["typed_config"] = ext_proc(doc)


def mode(**members: str) -> Change:
    return lambda doc: ext_proc(doc)["processing_mode"].update(members)


def move(of: int, to: int) -> Change:
    return lambda doc: chain(doc).insert(to, chain(doc).pop(of))


def script(old: str, new: str) -> Change:
    def change(doc: Doc) -> None:
        code = chain(doc)[_PASSING]["typed_config"]["default_source_code"]
        assert old in code["inline_string"]
        code["inline_string"] = code["inline_string"].replace(old, new)

    return change


def cluster(doc: Doc, name: str) -> Doc:
    (one,) = (c for c in doc["static_resources"]["clusters"] if c["name"] == name)
    found: Doc = one
    return found


def without_cluster(name: str) -> Change:
    return lambda doc: doc["static_resources"]["clusters"].remove(cluster(doc, name))


def override_host(name: str, member: str) -> Change:
    """Takes something out of a cluster's choice of a host."""

    def change(doc: Doc) -> None:
        (policy,) = cluster(doc, name)["load_balancing_policy"]["policies"]
        del policy["typed_extension_config"]["typed_config"][member]

    return change


def without_log(doc: Doc) -> None:
    logs = manager(doc)["access_log"]
    logs.remove(next(log for log in logs if "grpc" in log["name"]))


def on_route(index: int, **members: Any) -> Change:  # noqa: ANN401 - JSON
    return lambda doc: manager(doc)["route_config"]["virtual_hosts"][0]["routes"][index].update(members)


def per_filter(name: str, kind: str, **members: Any) -> Doc:  # noqa: ANN401 - JSON
    config = {"@type": f"type.googleapis.com/envoy.extensions.filters.http.{kind}", **members}
    return {"typed_per_filter_config": {f"envoy.filters.http.{name}": config}}


def trailers(doc: Doc) -> None:
    (options,) = cluster(doc, "decode")["typed_extension_protocol_options"].values()
    options["explicit_http_config"]["http_protocol_options"] = {"enable_trailers": True}


NO_LUA = per_filter("lua", "lua.v3.LuaPerRoute", disabled=True)
OTHER_LUA = per_filter("lua", "lua.v3.LuaPerRoute", source_code={"inline_string": "-- another"})
NO_EXT_PROC = per_filter("ext_proc", "ext_proc.v3.ExtProcPerRoute", disabled=True)
BARE = per_filter(
    "ext_proc",
    "ext_proc.v3.ExtProcPerRoute",
    overrides={"metadata_options": {"receiving_namespaces": {"untyped": ["kvreturn"]}}},
)

BREAKS: dict[str, tuple[Doc, Change, str]] = {
    "hand_over.lua behind ext_proc": (_ONE, move(_HOLDING, _EXT_PROC), "before ext_proc"),
    "no hand_over.lua": (_ONE, lambda doc: chain(doc).pop(_HOLDING), "take both, or none"),
    "an older script": (_ONE, script('local SCRIPTS = "2"', 'local SCRIPTS = "1"'), "another version"),
    "ext_proc for all answers": (_ONE, unwrap, "skipped exactly where"),
    "ext_proc left out elsewhere": (
        _ONE,
        lambda doc: rule(doc)["predicate"]["single_predicate"]["value_match"].update(exact="2"),
        "skipped exactly where",
    ),
    "ext_proc left out by another header": (
        _ONE,
        lambda doc: rule(doc)["predicate"]["single_predicate"]["input"]["typed_config"].update(header_name="x-a"),
        "skipped exactly where",
    ),
    "ext_proc left out in all other cases": (
        _ONE,
        lambda doc: wrapper(doc)["xds_matcher"].update(on_no_match=rule(doc)["on_match"]),
        "skipped exactly where",
    ),
    "ext_proc told of requests too": (_ONE, mode(request_header_mode="SEND"), "request_header_mode SKIP"),
    "ext_proc given bodies too": (_ONE, mode(request_body_mode="BUFFERED"), "request_body_mode NONE"),
    "metadata not forwarded": (
        _ONE,
        lambda doc: ext_proc(doc)["metadata_options"].pop("forwarding_namespaces"),
        "forwarding_namespaces",
    ),
    "metadata not forwarded on a route": (_ONE, on_route(_TURNS_ROUTE, **BARE), "forwarding_namespaces"),
    "ext_proc off on a route": (_ONE, on_route(_TURNS_ROUTE, **NO_EXT_PROC), "switch ext_proc on"),
    "nobody to call": (_ONE, without_cluster("kvreturn_requests@127.0.0.1:9090"), "get 500"),
    "one of two not to be called": (
        _TWO,
        without_cluster(f"kvreturn_requests@{B}"),
        f"no cluster kvreturn_requests@{B}",
    ),
    "nobody to tell of answers": (_ONE, without_cluster("kvreturn_calls@127.0.0.1:9090"), "end unstored"),
    "no cluster of one router": (_ONE, without_cluster("kvreturn_router@127.0.0.1:9090"), "log cannot reach"),
    "no log of what ends": (_ONE, without_log, "stay open"),
    "a log for one of two": (_TWO, without_log, f"kvreturn_router@{A}"),
    "no word of the router that has the turn": (
        _TWO,
        lambda doc: ext_proc(doc)["grpc_service"].pop("initial_metadata"),
        "x-kvreturn-to",
    ),
    "no ear for it": (_TWO, override_host("kvreturn_router", "override_host_sources"), "the header x-kvreturn-to"),
    "no word of the node": (_ONE, override_host("decode", "selected_host_key"), "kvreturn/upstream"),
    "a node's trailers": (_ONE, trailers, "enable_trailers"),
}


def changed(envoy: Doc, change: Change) -> Doc:
    doc = made(envoy)
    change(doc)
    return doc


@pytest.mark.parametrize(("envoy", "change", "words"), BREAKS.values(), ids=BREAKS)
def test_what_breaks_the_fast_lane_is_found(envoy: Doc, change: Change, words: str) -> None:
    (problem,) = lint(changed(envoy, change))
    assert problem.rule == "p-fast-lane"
    assert words in problem.what


OTHERS: dict[str, tuple[Doc, Change, str]] = {
    "no time for the prefill leg": (
        _ONE,
        script("local REQUEST_SECONDS = 65.0", "local REQUEST_SECONDS = 60.5"),
        "13-message-timeout",
    ),
    "no room for a body": (
        _ONE,
        lambda doc: manager(doc)["route_config"]["virtual_hosts"][0].update(request_body_buffer_limit=1000),
        "24-body-limit",
    ),
    "answers pass though the router fails": (
        _ONE,
        lambda doc: ext_proc(doc).update(failure_mode_allow=True),
        "31-unread-requests",
    ),
    "a route without the scripts": (_ONE, on_route(_TURNS_ROUTE, **NO_LUA), "31-other-way-in"),
    "a route with another script": (_ONE, on_route(_TURNS_ROUTE, **OTHER_LUA), "31-other-way-in"),
    "stored responses by such a route": (_ONE, on_route(0, name="plain"), "p-stored-responses"),
    "a router that drains is called": (
        _TWO,
        lambda doc: cluster(doc, f"kvreturn_requests@{A}").pop("health_checks"),
        "129-router-health",
    ),
}


@pytest.mark.parametrize(("envoy", "change", "name"), OTHERS.values(), ids=OTHERS)
def test_rules_of_all_lanes_know_what_the_scripts_do(envoy: Doc, change: Change, name: str) -> None:
    assert name in {p.rule for p in lint(changed(envoy, change))}


KEEPS: dict[str, tuple[Doc, Change]] = {
    "one router": (_ONE, lambda _: None),
    "two routers": (_TWO, lambda _: None),
    "Unix sockets": ({"routers": ["unix:/run/a", "unix:/run/b"]}, lambda _: None),
    "an orchestrator's listeners, which have no scripts": ({"orchestrated": {}}, lambda _: None),
    "routers under a name, so without scripts": ({"routers": ["router:9090"]}, lambda _: None),
    "one router needs no name": (_ONE, lambda doc: ext_proc(doc)["grpc_service"].pop("initial_metadata")),
    "ext_proc waits for answers only": (_ONE, lambda doc: ext_proc(doc).update(message_timeout="2s")),
    "ext_proc sets no metadata": (_ONE, lambda doc: ext_proc(doc)["metadata_options"].pop("receiving_namespaces")),
    "turns by a route of which the script leaves the rest alone": (_ONE, on_route(_TURNS_ROUTE, name="plain")),
    "retries of what the router does not hear of": (
        _ONE,
        on_route(_PLAIN_ROUTE, route={"cluster": "decode", "timeout": "0s", "retry_policy": {"retry_on": "5xx"}}),
    ),
}


@pytest.mark.parametrize(("envoy", "change"), KEEPS.values(), ids=KEEPS)
def test_what_does_not_break_it_is_not_found(envoy: Doc, change: Change) -> None:
    assert lint(changed(envoy, change)) == []


def passes_early(doc: Doc) -> None:
    chain(doc).insert(0, chain(doc).pop(_PASSING))


def no_fast_lane(doc: Doc) -> None:
    del chain(doc)[_PASSING]


@pytest.mark.parametrize("change", [passes_early, no_fast_lane])
def test_without_the_script_behind_it_ext_proc_must_read_requests(change: Change) -> None:
    found = [(p.rule, p.what) for p in lint(changed(_ONE, change))]
    unread = [what for rule, what in found if rule == "31-unread-requests"]
    assert [w.partition(":")[0] for w in unread[1:]] == ["request_header_mode SKIP", "request_body_mode NONE"]
    assert "a matcher leaves the filter out" in unread[0]
    assert "p-fast-lane" in {rule for rule, _ in found}


def test_a_chain_without_either_script_is_the_portable_lane() -> None:
    assert has_scripts(made(_ONE))
    portable = made({"lane": "portable"})
    assert lint(portable) == []
    assert not has_scripts(portable)
