"""Roles `prefill` and `decode`: vLLM's example proxies, unmodified, before Envoy, the router and simulated nodes."""

import copy
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from kvreturn.envoy import names
from kvreturn.server.app import running
from support.envoy import Json, unused_address
from support.gateway import BODY_MODES, CHAT, COMPLETIONS, client, product
from support.orchestrators import MULTITURN, TOY, Addresses, orchestrated, orchestrator, script
from support.redis import needs_redis, server
from support.talk import Talk

TURNS = 3


@pytest.mark.parametrize(("name", "shipped"), [(TOY, BODY_MODES[0]), (TOY, BODY_MODES[1]), (MULTITURN, BODY_MODES[0])])
async def test_conversations_are_read_back_from_turn_2_on_and_their_clients_see_no_difference(
    name: str, shipped: str
) -> None:
    async with orchestrated(name, shipped) as (proxy, there), client(proxy.url) as sdk, client(there.oracle) as plain:
        for i, (api, stream) in enumerate([(CHAT, True), (CHAT, False), (COMPLETIONS, True), (COMPLETIONS, False)]):
            talk, expected = (Talk(f"Ada{i}", api, stream=stream) for _ in range(2))
            for _ in range(TURNS):
                assert await talk.turn(sdk) == await expected.turn(plain)
            counted = await there.front.outcomes((i + 1) * TURNS)
            assert counted == {"first_turn": i + 1, "hit": (i + 1) * (TURNS - 1)}
        read = sum(node.stats.read_tokens for node in there.p)
        assert read == there.front.metric("read_back_tokens_total") > 0


async def test_with_stock_prefill_nodes_the_router_proves() -> None:
    async with (
        orchestrated(TOY, stock=True, proof="router") as (proxy, there),
        client(proxy.url) as sdk,
        client(there.oracle) as plain,
    ):
        for i, api in enumerate([CHAT, COMPLETIONS]):
            talk, expected = (Talk(f"Ada{i}", api, stream=True) for _ in range(2))
            for _ in range(TURNS):
                assert await talk.turn(sdk) == await expected.turn(plain)
            counted = await there.front.outcomes((i + 1) * TURNS)
            assert counted.pop("first_turn") == i + 1
            assert sum(counted.get(word, 0) for word in ("hit", "partial_hit")) == (i + 1) * (TURNS - 1)
        assert there.p[0].stats.read_tokens > 0


async def test_conversations_stay_at_their_nodes() -> None:
    async with orchestrated(TOY, prefills=2, decodes=2) as (proxy, there), client(proxy.url) as sdk:
        talks = [Talk(name, CHAT, stream=True) for name in ("Ada", "Bob")]
        for _ in range(3):
            for talk in talks:
                await talk.turn(sdk)
        assert await there.front.outcomes(6) == {"first_turn": 2, "hit": 4}
        for nodes in (there.p, there.d):
            assert sorted(len(there.asked(node, CHAT)) for node in nodes) == [3, 3]


async def test_histories_that_are_edited_branched_or_asked_again_are_answered_as_ever() -> None:
    """P has no cache and reads what it can, so a wrong read would show in the answer."""
    async with orchestrated(TOY, decodes=2) as (proxy, there), client(proxy.url) as sdk, client(there.oracle) as plain:
        talk, expected = (Talk("Ada", CHAT, stream=True) for _ in range(2))

        async def turn(*, keep: int, edit: str = "") -> None:
            for each in (talk, expected):
                del each.messages[keep:]
                if edit:
                    each.messages[0] = {"role": "user", "content": edit}
            assert await talk.turn(sdk) == await expected.turn(plain)

        for _ in range(2):
            await turn(keep=9)
        for keep, edit in (
            (2, ""),
            (2, ""),
            (4, "Something else, that is long enough to matter. " * 9),
            (3, ""),
            (0, ""),
        ):
            await turn(keep=keep, edit=edit)
            await turn(keep=9)
        counted = await there.front.outcomes(12)
        assert counted["hit"] >= 6
        assert sum(node.stats.read_tokens for node in there.p) > 0


async def test_nodes_that_fail_on_a_handle_cost_no_more_than_a_cold_turn() -> None:
    async with (
        orchestrated(TOY, prefill={"timeout": 1.0}) as (proxy, there),
        client(proxy.url) as sdk,
        client(there.oracle) as plain,
    ):
        p, d = there.p[0], there.d[0]
        breaks: dict[str, Callable[[], object]] = {
            "500": lambda: p.faults.add(CHAT, "status", status=500),
            "503": lambda: p.faults.add(CHAT, "status", status=503),
            "P breaks off": lambda: p.faults.add(CHAT, "drop"),
            "D was replaced": d.restart,
            "P hangs": lambda: p.faults.add(CHAT, "hang"),
        }
        for name, broken in breaks.items():
            talk, expected = (Talk(name, CHAT, stream=True) for _ in range(2))
            for turn in range(3):
                if turn == 1:
                    broken()
                assert await talk.turn(sdk) == await expected.turn(plain), name
        # An engine whose read hung is not read from for a while.
        counted = {"first_turn": 5, "read_failed": 4, "node_gone": 1, "hit": 4, "breaker_open": 1}
        assert await there.front.outcomes(15) == counted


@pytest.mark.parametrize("name", [TOY, MULTITURN])
async def test_a_turn_that_fails_leaves_nothing_and_the_next_one_is_right(name: str) -> None:
    async with orchestrated(name) as (proxy, there), client(there.oracle) as plain:
        talk, expected = (Talk("Ada", CHAT, stream=False) for _ in range(2))
        async with client(proxy.url) as sdk:
            assert await talk.turn(sdk) == await expected.turn(plain)
            there.d[0].faults.add(CHAT, "status", status=500)
            with pytest.raises(openai.APIError):
                await talk.turn(sdk)
        talk.messages.pop()
        async with client(proxy.url) as sdk:  # the toy proxy cuts the connection
            for _ in range(2):
                assert await talk.turn(sdk) == await expected.turn(plain)
        assert await there.front.outcomes(4) == {"first_turn": 1, "hit": 2, "already_taken": 1}


async def test_a_proxy_that_would_keep_handles_itself_gets_none_and_its_misses_are_hits() -> None:
    async with orchestrated(MULTITURN) as (proxy, there), client(proxy.url) as sdk, client(there.oracle) as plain:
        talk, expected = (Talk("Ada", CHAT, stream=True) for _ in range(2))
        talk.more = {"conversation_id": "one"}
        for _ in range(TURNS):
            assert await talk.turn(sdk) == await expected.turn(plain)
        assert await there.front.outcomes(TURNS) == {"first_turn": 1, "hit": TURNS - 1}
        assert sum("conv=one: cache MISS" in line for line in proxy.log) == TURNS
        assert not any("cache HIT" in line for line in proxy.log)


async def test_handles_that_a_proxy_has_from_elsewhere_are_left_to_it() -> None:
    """Its decode leg goes past the router, so it does get them."""
    at = Addresses()
    script(MULTITURN)
    async with product("kvreturn", envoy=at.settings) as there:
        decode = there.front.settings.pools.sources["decode"].static[0]
        async with (
            orchestrator(MULTITURN, at.prefill, decode) as proxy,
            client(proxy.url) as sdk,
            client(there.oracle) as plain,
        ):
            talk, expected = (Talk("Ada", CHAT, stream=False) for _ in range(2))
            talk.more = {"conversation_id": "one"}
            for _ in range(TURNS):
                assert await talk.turn(sdk) == await expected.turn(plain)
            assert await there.front.outcomes(TURNS) == {"first_turn": 1, "foreign_handle": TURNS - 1}
            assert there.p[0].stats.read_tokens > 0
            assert there.front.store.handles == 0


def _managers(bootstrap: Json) -> dict[str, Json]:
    """HTTP connection managers by the name of their listener."""
    listeners = bootstrap["static_resources"]["listeners"]
    return {x["name"]: x["filter_chains"][0]["filters"][0]["typed_config"] for x in listeners}


@needs_redis
async def test_the_legs_of_a_turn_may_pass_different_routers(tmp_path: Path) -> None:
    second = unused_address()

    def change(bootstrap: Json) -> None:
        """The decode legs to the second router."""
        clusters = bootstrap["static_resources"]["clusters"]
        other = copy.deepcopy(next(c for c in clusters if c["name"] == names.ROUTER_CLUSTER))
        other["name"] = other["load_assignment"]["cluster_name"] = "kvreturn_second"
        endpoint = other["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
        endpoint["address"]["socket_address"]["port_value"] = int(second.rpartition(":")[2])
        clusters.append(other)
        config = _managers(bootstrap)["orchestrated_decode"]["http_filters"][0]["typed_config"]
        config["grpc_service"]["envoy_grpc"]["cluster_name"] = "kvreturn_second"

    with server(tmp_path) as redis:
        store = {"url": redis.url, "deadline": 1.0}
        async with (
            orchestrated(TOY, change=change, store=store, secret="s" * 16) as (proxy, there),
            running(there.front.settings.model_copy(update={"listen": second})) as router,
            client(proxy.url) as sdk,
            client(there.oracle) as plain,
        ):
            talk, expected = (Talk("Ada", CHAT, stream=True) for _ in range(2))
            for _ in range(TURNS):
                assert await talk.turn(sdk) == await expected.turn(plain)
            assert await there.front.outcomes(TURNS) == {"first_turn": 1, "hit": TURNS - 1}
            assert there.front.metric("handles_captured_total") == 0
            assert router.world.metrics.value("kvreturn_handles_captured_total") == TURNS


async def test_one_listener_may_have_both_roles_by_route() -> None:
    at = Addresses()
    port = at.decode.rpartition(":")[2]
    script(TOY)

    def change(bootstrap: Json) -> None:
        """What is for `localhost` has role `prefill` on the listener of role `decode`."""
        managers = _managers(bootstrap)
        (host,) = copy.deepcopy(managers["orchestrated_prefill"]["route_config"]["virtual_hosts"])
        said = {"grpc_initial_metadata": [{"key": "x-kvreturn-role", "value": "prefill"}]}
        override = {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": said,
        }
        host |= {"domains": [f"localhost:{port}"], "typed_per_filter_config": {names.EXT_PROC_FILTER: override}}
        managers["orchestrated_decode"]["route_config"]["virtual_hosts"].append(host)

    async with (
        product("kvreturn", envoy=at.settings, change=change) as there,
        orchestrator(TOY, f"localhost:{port}", at.decode) as proxy,
        client(proxy.url) as sdk,
    ):
        talk = Talk("Ada", CHAT, stream=True)
        for _ in range(TURNS):
            await talk.turn(sdk)
        assert await there.front.outcomes(TURNS) == {"first_turn": 1, "hit": TURNS - 1}
