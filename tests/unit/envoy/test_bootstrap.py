"""The bootstrap as typed messages, and as text."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvreturn.config import SECRET_ENV, ConfigError, Settings
from kvreturn.config_file import load_settings
from kvreturn.envoy import bootstrap, protos
from kvreturn.envoy.lint import lint
from kvreturn.envoy.names import EXT_PROC_FILTER
from kvreturn.envoy.protos import (
    cluster_pb,
    core_pb,
    ext_proc_pb,
    hcm_pb,
    http_pb,
    listener_pb,
    matcher_pb,
    matching_pb,
    override_host_pb,
    route_pb,
    skip_pb,
)
from kvreturn.envoy.scripts import routers

ROOT = Path(__file__).parents[3]
POOLS = {"prefill": ["10.0.0.1:8000", "10.0.0.2:8000"], "decode": ["10.0.0.3:8000", "10.0.0.4:8000"]}
EXPOSED = "the prefill listener %s"
Json = dict[str, Any]


def settings(**members: object) -> Settings:
    return Settings.model_validate({"pools": POOLS, **members})


def listener(name: str, made_of: Settings) -> listener_pb.Listener:
    resources = bootstrap.build(made_of).static_resources
    assert resources
    return next(x for x in resources.listeners if x.name == name)


def manager(name: str, made_of: Settings) -> hcm_pb.HttpConnectionManager:
    config = listener(name, made_of).filter_chains[0].filters[0].typed_config
    assert config
    message = config.unpack()
    assert isinstance(message, hcm_pb.HttpConnectionManager)
    return message


def ext_proc(made_of: Settings, name: str = "client") -> ext_proc_pb.ExternalProcessor:
    config = next(f for f in manager(name, made_of).http_filters if f.name == EXT_PROC_FILTER).typed_config
    assert config
    message = config.unpack()
    if isinstance(message, matching_pb.ExtensionWithMatcher):
        assert message.extension_config
        assert message.extension_config.typed_config
        message = message.extension_config.typed_config.unpack()
    assert isinstance(message, ext_proc_pb.ExternalProcessor)
    return message


def cluster(name: str, made_of: Settings) -> cluster_pb.Cluster:
    resources = bootstrap.build(made_of).static_resources
    assert resources
    return next(x for x in resources.clusters if x.name == name)


def hosts(made_of: cluster_pb.Cluster) -> list[str]:
    assert made_of.load_assignment
    found = []
    for endpoint in made_of.load_assignment.endpoints[0].lb_endpoints:
        assert endpoint.endpoint
        address = endpoint.endpoint.address
        assert address
        socket = address.socket_address
        found.append(f"{socket.address} {socket.port_value}" if socket else str(address.pipe and address.pipe.path))
    return found


def routes(made_of: hcm_pb.HttpConnectionManager) -> list[route_pb.Route]:
    assert made_of.route_config
    return made_of.route_config.virtual_hosts[0].routes


def override_host(policy: cluster_pb.LoadBalancingPolicy | None) -> override_host_pb.OverrideHost:
    """A policy, which is one of this kind."""
    assert policy
    extension = policy.policies[0].typed_extension_config
    assert extension
    assert extension.typed_config
    config = extension.typed_config.unpack()
    assert isinstance(config, override_host_pb.OverrideHost)
    return config


class TestExtProc:
    @pytest.mark.parametrize(
        ("request_mode", "response_mode", "request_trailers", "override"),
        [
            ("BUFFERED", "STREAMED", "SKIP", True),
            ("FULL_DUPLEX_STREAMED", "STREAMED", "SEND", False),
            ("BUFFERED", "FULL_DUPLEX_STREAMED", "SKIP", False),
            ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED", "SEND", False),
        ],
    )
    def test_modes(self, request_mode: str, response_mode: str, request_trailers: str, *, override: bool) -> None:
        modes = {"request_body_mode": request_mode, "response_body_mode": response_mode}
        made = ext_proc(settings(envoy={"lane": "portable", **modes}))
        assert made.processing_mode
        assert made.processing_mode.request_body_mode == ext_proc_pb.ProcessingModeBodySendMode[request_mode]
        assert made.processing_mode.response_body_mode == ext_proc_pb.ProcessingModeBodySendMode[response_mode]
        assert made.processing_mode.request_trailer_mode == ext_proc_pb.ProcessingModeHeaderSendMode[request_trailers]
        assert made.processing_mode.response_trailer_mode == ext_proc_pb.ProcessingModeHeaderSendMode.SEND
        assert made.allow_mode_override is override

    def test_waits_longer_than_the_prefill_leg(self) -> None:
        made = ext_proc(settings(prefill={"timeout": 7.5}))
        assert made.message_timeout
        assert made.message_timeout.total_seconds() == 12.5

    @pytest.mark.parametrize("lane", ["portable", "fast"])
    def test_fails_closed_and_takes_only_our_metadata(self, lane: str) -> None:
        made = ext_proc(settings(envoy={"lane": lane}))
        assert not made.failure_mode_allow
        assert made.metadata_options
        assert made.metadata_options.receiving_namespaces
        assert made.metadata_options.receiving_namespaces.untyped == ["kvreturn"]
        told = made.metadata_options.forwarding_namespaces
        assert (told and told.untyped) == (["kvreturn"] if lane == "fast" else None)
        assert made.mutation_rules is None
        assert made.response_attributes == ["upstream.address"]

    def test_sees_answers_only_where_a_script_takes_requests_and_none_that_the_script_takes_on(self) -> None:
        made = ext_proc(settings())
        assert made.processing_mode
        assert made.processing_mode.request_header_mode == ext_proc_pb.ProcessingModeHeaderSendMode.SKIP
        assert made.processing_mode.request_body_mode == ext_proc_pb.ProcessingModeBodySendMode.NONE
        assert made.processing_mode.response_header_mode == ext_proc_pb.ProcessingModeHeaderSendMode.SEND
        assert made.processing_mode.response_body_mode == ext_proc_pb.ProcessingModeBodySendMode.STREAMED
        (config,) = (f.typed_config for f in manager("client", settings()).http_filters if f.name == EXT_PROC_FILTER)
        assert config
        wrapped = config.unpack()
        assert isinstance(wrapped, matching_pb.ExtensionWithMatcher)
        assert wrapped.xds_matcher
        assert wrapped.xds_matcher.matcher_list
        (rule,) = wrapped.xds_matcher.matcher_list.matchers
        assert rule.predicate
        assert rule.predicate.single_predicate
        found = rule.predicate.single_predicate
        assert found.input
        assert found.input.typed_config
        assert found.input.typed_config.unpack() == matcher_pb.HttpResponseHeaderMatchInput(
            header_name="x-kvreturn-passes"
        )
        assert found.value_match
        assert found.value_match.exact == "1"
        assert rule.on_match
        assert rule.on_match.action
        assert rule.on_match.action.typed_config
        assert isinstance(rule.on_match.action.typed_config.unpack(), skip_pb.SkipFilter)


class TestListeners:
    @pytest.mark.parametrize(
        ("made_of", "scripts"),
        [
            (settings(), True),
            (settings(workers=3, store={"url": "redis://h"}, secret="s"), True),
            (settings(envoy={"routers": ["10.0.0.9:9090", "unix:/r", "localhost:9090"]}), True),
            (settings(envoy={"routers": ["10.0.0.9:9090", "kvreturn-router:9090"]}), False),
            (settings(listen="router:9090"), False),
            (settings(envoy={"lane": "portable"}), False),
        ],
    )
    def test_scripts_take_turns_where_envoy_can_tell_the_routers_apart(
        self, made_of: Settings, *, scripts: bool
    ) -> None:
        assert made_of.fast_lane is scripts
        found = [f.name.rpartition(".")[2] for f in manager("client", made_of).http_filters]
        whole = ["health_check", "lua", "ext_proc", "lua", "router"]
        assert found == (whole if scripts else ["health_check", "ext_proc", "lua", "router"])

    def test_the_script_tells_requests_of_routes_that_it_knows_by_name(self) -> None:
        assert [(r.name, dict(r.typed_per_filter_config)) for r in routes(manager("client", settings()))] == [
            ("stored", {}),
            ("plain", {}),
            ("inference", {}),
        ]

    def test_only_methods_without_a_body_go_past_the_router_and_not_where_a_handle_may_be(self) -> None:
        stored, plain, inference = routes(manager("client", settings(envoy={"lane": "portable"})))
        assert stored.match
        assert stored.match.prefix == "/v1/responses/"
        assert not stored.typed_per_filter_config
        assert plain.match
        assert plain.match.headers[0].name == ":method"
        assert plain.match.headers[0].string_match
        assert plain.match.headers[0].string_match.safe_regex
        assert plain.match.headers[0].string_match.safe_regex.regex == "GET|HEAD|OPTIONS"
        override = plain.typed_per_filter_config["envoy.filters.http.ext_proc"].unpack()
        assert isinstance(override, ext_proc_pb.ExtProcPerRoute)
        assert override.disabled
        assert not inference.typed_per_filter_config

    def test_streams_have_no_deadline_and_no_retries(self) -> None:
        for route in routes(manager("client", settings())):
            assert route.route
            assert route.route.timeout is not None
            assert route.route.timeout.total_seconds() == 0
            assert route.route.retry_policy is None

    def test_the_body_limit_leaves_room_for_the_handle(self) -> None:
        table = manager("client", settings(limits={"request_bytes": 1000, "event_bytes": 200})).route_config
        assert table
        assert table.virtual_hosts[0].request_body_buffer_limit == 1200

    def test_the_prefill_leg_ends_with_its_timeout(self) -> None:
        made = manager("prefill", settings(prefill={"timeout": 20}))
        (route,) = routes(made)
        assert route.route
        assert route.route.timeout
        assert route.route.timeout.total_seconds() == 20
        assert made.stream_idle_timeout
        assert made.stream_idle_timeout.total_seconds() > 20

    @pytest.mark.parametrize(
        ("role", "port", "cluster_of_it", "timeout"), [("prefill", 8002, "prefill", 9), ("decode", 8003, "decode", 0)]
    )
    def test_an_orchestrator_finds_the_nodes_behind_a_router_with_their_role(
        self, role: str, port: int, cluster_of_it: str, timeout: int
    ) -> None:
        made_of = settings(prefill={"timeout": 9}, envoy={"orchestrated": {}})
        name = f"orchestrated_{role}"
        address = listener(name, made_of).address
        assert address
        assert address.socket_address
        assert address.socket_address.port_value == port
        last = routes(manager(name, made_of))[-1].route
        assert last
        assert (last.cluster, last.timeout) == (cluster_of_it, timedelta(seconds=timeout))
        said = ext_proc(made_of, name).grpc_service
        assert said
        assert [(h.key, h.value) for h in said.initial_metadata] == [("x-kvreturn-role", role)]
        for lane, words in (("portable", []), ("fast", [("x-kvreturn-to", "%DYNAMIC_METADATA(kvreturn:router)%")])):
            client = ext_proc(settings(envoy={"lane": lane, "orchestrated": {}})).grpc_service
            assert client
            assert [(h.key, h.value) for h in client.initial_metadata] == words

    def test_localhost_becomes_an_address(self) -> None:
        address = listener("client", settings(envoy={"listen": "localhost:8000"})).address
        assert address
        assert address.socket_address == core_pb.SocketAddress(address="127.0.0.1", port_value=8000)


class TestClusters:
    def test_addresses_are_static_and_names_are_looked_up(self) -> None:
        assert cluster("decode", settings()).type == cluster_pb.ClusterDiscoveryType.STATIC
        mixed = settings(pools={**POOLS, "decode": ["10.0.0.3:8000", "vllm-1.pods:8000", "[fd00::7]:8000"]})
        made = cluster("decode", mixed)
        assert made.type == cluster_pb.ClusterDiscoveryType.STRICT_DNS
        assert hosts(made) == ["10.0.0.3 8000", "vllm-1.pods 8000", "fd00::7 8000"]
        assert cluster("prefill", mixed).type == cluster_pb.ClusterDiscoveryType.STATIC

    @pytest.mark.parametrize(("name", "key"), [("decode", "decode_node"), ("prefill", "prefill_node")])
    def test_the_router_may_name_a_node_of(self, name: str, key: str) -> None:
        policy = cluster(name, settings()).load_balancing_policy
        config = override_host(policy)
        (source,) = config.override_host_sources
        assert source.metadata
        assert (source.metadata.key, [p.key for p in source.metadata.path]) == ("kvreturn", [key])
        assert config.fallback_policy
        fallback = config.fallback_policy.policies[0].typed_extension_config
        assert fallback
        assert fallback.name == "envoy.load_balancing_policies.least_request"

    def test_envoy_lets_go_of_idle_connections_before_vllm_does(self) -> None:
        options = cluster("decode", settings()).typed_extension_protocol_options
        (packed,) = options.values()
        config = packed.unpack()
        assert isinstance(config, http_pb.HttpProtocolOptions)
        assert config.common_http_protocol_options
        assert config.common_http_protocol_options.idle_timeout
        assert config.common_http_protocol_options.idle_timeout.total_seconds() < 5

    def test_health_is_asked_where_the_settings_say(self) -> None:
        (check,) = cluster("prefill", settings(envoy={"health_check_path": "/ping"})).health_checks
        assert check.http_health_check
        assert check.http_health_check.path == "/ping"

    @pytest.mark.parametrize(
        ("listen", "reached"),
        [
            ("127.0.0.1:9090", "127.0.0.1 9090"),
            ("0.0.0.0:9090", "127.0.0.1 9090"),
            ("[::]:9090", "::1 9090"),
            ("10.0.0.9:9090", "10.0.0.9 9090"),
            ("unix:/run/kvreturn.sock", "/run/kvreturn.sock"),
        ],
    )
    def test_the_router_is_reached_where_it_listens(self, listen: str, reached: str) -> None:
        made = cluster("kvreturn_router", settings(listen=listen))
        assert hosts(made) == [reached]
        # TCP keepalive cannot be set on a Unix socket: Envoy would fail to connect.
        assert (made.upstream_connection_options is None) == listen.startswith("unix:")


class TestRefusals:
    @pytest.mark.parametrize(
        ("members", "names"),
        [
            ({"prefill": {"timeout": 3596}, "envoy": {"stream_idle_timeout": 9999}}, "prefill.timeout"),
            ({"prefill": {"timeout": 300}}, "envoy.stream_idle_timeout"),
            ({"envoy": {"listen": "gateway.example:8000"}}, "gateway.example:8000"),
        ],
    )
    def test_name_the_setting(self, members: Json, names: str) -> None:
        with pytest.raises(ConfigError, match=names):
            bootstrap.build(settings(**members))


class TestWarnings:
    @pytest.mark.parametrize(
        ("members", "said"),
        [
            ({}, []),
            ({"envoy": {"listen": "localhost:8000"}, "listen": "unix:/run/x"}, []),
            ({"envoy": {"listen": "0.0.0.0:8000"}}, ["clients connect to 0.0.0.0:8000 without TLS"]),
            ({"envoy": {"routers": ["router:9090"], "lane": "portable"}}, []),
            ({"envoy": {"prefill_listen": "10.0.0.9:8001"}}, [EXPOSED % "10.0.0.9:8001 is not on a loopback"]),
            ({"envoy": {"prefill_listen": "10.0.0.9:8001", "routers": ["10.0.0.8:9090"]}}, []),
            (
                {"envoy": {"prefill_listen": "10.0.0.9:8001", "routers": ["127.0.0.1:1", "unix:/x"]}},
                [EXPOSED % "10.0.0.9:8001 is not on a loopback"],
            ),
            (
                {"envoy": {"prefill_listen": "0.0.0.0:8001", "routers": ["router:9090"]}},
                ["envoy.lane: fast has no effect", EXPOSED % "0.0.0.0:8001 is on every network"],
            ),
            ({"envoy": {"admin": "[::]:9901"}}, ["Envoy's admin port [::]:9901"]),
            ({"envoy": {"orchestrated": {}}}, []),
            ({"envoy": {"orchestrated": {"decode_listen": "0.0.0.0:1"}}}, ["the addresses of envoy.orchestrated are"]),
            ({"listen": "0.0.0.0:9090"}, ["the router listens on 0.0.0.0:9090"]),
            ({"pools": {**POOLS, "decode": ["a:1", "b:1"]}}, ["pools.decode has host names (a:1, b:1)"]),
            ({"pools": {**POOLS, "decode": ["a:1"]}}, []),
            ({"pools": {**POOLS, "decode": ["a:1", "b:1"]}, "envoy": {"endpoints": "router"}}, []),
        ],
    )
    def test_say_what_is_exposed_or_imprecise(self, members: Json, said: list[str]) -> None:
        found = bootstrap.warnings(settings(**members))
        assert len(found) == len(said)
        assert all(text.startswith(start) for text, start in zip(found, said, strict=True))


class TestText:
    def test_tells_what_it_is_and_what_to_worry_about(self) -> None:
        text = bootstrap.render(settings(envoy={"admin": "0.0.0.0:9901"}))
        comments = [line for line in text.splitlines() if line.startswith("#")]
        assert text.startswith("\n".join(comments) + "\nstatic_resources:\n  listeners:\n")
        assert "`kvreturn envoy-config`" in comments[0]
        assert "envoy -c FILE" in comments[1]
        assert comments[2].startswith("# WARNING: Envoy's admin port 0.0.0.0:9901")

    def test_is_the_same_document(self) -> None:
        made_of = settings()
        assert yaml.safe_load(bootstrap.render(made_of)) == bootstrap.to_dict(bootstrap.build(made_of))

    def test_holds_no_secret(self) -> None:
        assert "hunter2" not in bootstrap.render(settings(secret="hunter2"))

    @pytest.mark.parametrize(
        ("config", "shipped"),
        [
            ("kvreturn.yaml", "gateway.yaml"),
            ("portable-lane.yaml", "gateway-portable-lane.yaml"),
            ("full-duplex.yaml", "gateway-full-duplex.yaml"),
            ("orchestrated.yaml", "orchestrated.yaml"),
        ],
    )
    def test_shipped_file_is_current(self, config: str, shipped: str) -> None:
        expected = bootstrap.render(load_settings(ROOT / "examples" / config, {}))
        hint = f"run: kvreturn envoy-config --config examples/{config} -o envoy/{shipped}"
        assert (ROOT / "envoy" / shipped).read_text() == expected, hint


class TestCalls:
    """How the scripts reach the routers, each alone."""

    @pytest.mark.parametrize(
        ("members", "reached"),
        [
            ({}, {"127.0.0.1:9090": "127.0.0.1 8090"}),
            ({"listen": "0.0.0.0:9090"}, {"127.0.0.1:9090": "127.0.0.1 8090"}),
            ({"listen": "localhost:9090"}, {"127.0.0.1:9090": "localhost 8090"}),
            ({"listen": "[::]:9090", "calls": "[::]:7"}, {"[::1]:9090": "::1 7"}),
            ({"listen": "unix:/run/k"}, {"/run/k": "/run/k.calls"}),
            (
                {"calls": "127.0.0.1:8000", "envoy": {"routers": ["10.0.0.8:9090", "10.0.0.9:9091"]}},
                {"10.0.0.8:9090": "10.0.0.8 8000", "10.0.0.9:9091": "10.0.0.9 8001"},
            ),
            (
                {"workers": 2, "store": {"url": "redis://h"}, "secret": "s"},
                {"127.0.0.1:9090": "127.0.0.1 8090", "127.0.0.1:9092": "127.0.0.1 8092"},
            ),
        ],
    )
    def test_each_router_has_a_cluster_for_them_and_one_for_the_log(
        self, members: Json, reached: dict[str, str]
    ) -> None:
        members = {**members, "envoy": {"listen": "127.0.0.1:1", **members.get("envoy", {})}}
        made_of = settings(**members)
        document = bootstrap.to_dict(bootstrap.build(made_of))
        assert lint(document) == []
        named = [c["name"] for c in document["static_resources"]["clusters"] if "@" in c["name"]]
        assert named == [f"kvreturn_{kind}@{router}" for router in reached for kind in ("requests", "calls", "router")]
        for router, address in reached.items():
            for kind in ("requests", "calls"):
                assert hosts(cluster(f"kvreturn_{kind}@{router}", made_of)) == [address]
            # What has begun goes to its end, also at a router that drains.
            assert not cluster(f"kvreturn_calls@{router}", made_of).health_checks
            alone = cluster(f"kvreturn_router@{router}", made_of)
            assert len(hosts(alone)) == 1
            assert alone.load_assignment
            assert alone.load_assignment.cluster_name == alone.name
        (script,) = (
            f["typed_config"]["default_source_code"]["inline_string"]
            for f in document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"][
                "http_filters"
            ]
            if "Answer" in str(f)
        )
        assert routers(script) == list(reached)
        assert f"local EVENT_BYTES = {made_of.limits.event_bytes}\n" in script

    @pytest.mark.parametrize(("several", "checked"), [([], 0), (["10.0.0.8:9090", "10.0.0.9:9090"], 1)])
    def test_one_that_drains_is_called_only_where_there_is_no_other(self, several: list[str], checked: int) -> None:
        made_of = settings(envoy={"routers": several})
        (name,) = [f"kvreturn_requests@{r}" for r in (several or ["127.0.0.1:9090"])[:1]]
        checks = cluster(name, made_of).health_checks
        assert [c.http_health_check and c.http_health_check.path for c in checks] == ["/kvreturn/health"] * checked

    def test_an_answer_goes_to_the_router_that_has_its_turn(self) -> None:
        made_of = settings(envoy={"routers": ["10.0.0.8:9090", "10.0.0.9:9090"]})
        policy = cluster("kvreturn_router", made_of).load_balancing_policy
        config = override_host(policy)
        assert [source.header for source in config.override_host_sources] == ["x-kvreturn-to"]


def test_with_endpoints_from_a_router_no_node_stands_in_it_and_no_rule_is_broken() -> None:
    made_of = settings(envoy={"endpoints": "router"})
    document = bootstrap.to_dict(bootstrap.build(made_of))
    assert "10.0.0." not in yaml.dump(document)
    assert lint(document) == []
    for name in ("decode", "prefill"):
        told = cluster(name, made_of)
        assert told.type == cluster_pb.ClusterDiscoveryType.EDS
        assert told.ignore_health_on_host_removal


def test_the_two_routers_of_the_example_share_all_but_where_they_listen() -> None:
    a, b = (load_settings(ROOT / f"examples/two-routers/{name}.yaml", {SECRET_ENV: "s"}) for name in "ab")
    assert bootstrap.render(a) == bootstrap.render(b)
    assert lint(yaml.safe_load(bootstrap.render(a))) == []
    assert a.envoy.routers == [a.listen, b.listen]
    assert len({*a.listens().values(), *b.listens().values()}) == len(a.listens()) + 3
    assert a == b.model_copy(update={"listen": a.listen, "admin": a.admin})


def test_the_protos_come_without_pydantics_warnings() -> None:
    # Under pytest's "error" filter the import at the head of this file would have failed.
    assert sorted(protos.__all__) == sorted(n for n in vars(protos) if n.endswith("_pb") or n == "Any")


class TestSeveralRouters:
    ROUTERS: Json = {"envoy": {"routers": ["10.0.0.9:9090", "10.0.0.10:9090"]}}  # noqa: RUF012 - never changed
    NAMED: Json = {"envoy": {"routers": ["kvreturn-router:9090"]}}  # noqa: RUF012 - never changed; a headless Service

    def test_one_that_breaks_off_or_drains_gets_no_more_streams(self) -> None:
        made = cluster("kvreturn_router", settings(**self.ROUTERS))
        assert hosts(made) == ["10.0.0.9 9090", "10.0.0.10 9090"]
        assert made.outlier_detection
        assert made.outlier_detection.consecutive_local_origin_failure == 1
        assert made.outlier_detection.enforcing_consecutive_5xx == 0
        assert [check.grpc_health_check is not None for check in made.health_checks] == [True]

    def test_all_addresses_of_a_name_are_routers(self) -> None:
        made = cluster("kvreturn_router", settings(**self.NAMED))
        assert made.type == cluster_pb.ClusterDiscoveryType.STRICT_DNS
        assert made.load_balancing_policy
        assert [check.grpc_health_check is not None for check in made.health_checks] == [True]

    @pytest.mark.parametrize("several", [ROUTERS, NAMED, {"workers": 2, "store": {"url": "redis://h"}, "secret": "s"}])
    def test_only_what_no_router_has_seen_is_sent_again(self, several: Json) -> None:
        service = ext_proc(settings(**several)).grpc_service
        assert service
        assert service.retry_policy
        assert service.retry_policy.retry_on == "connect-failure,refused-stream,reset-before-request"

    def test_a_single_one_is_neither_ejected_nor_avoided(self) -> None:
        assert cluster("kvreturn_router", settings()).outlier_detection is None
        service = ext_proc(settings()).grpc_service
        assert service
        assert service.retry_policy is None
