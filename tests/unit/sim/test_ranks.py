"""Several engines behind one server."""

import re

import aiohttp

from kvreturn.sim import NO_TIMING, NodeConfig, SimNode

PROMPT = {"model": "sim", "prompt": "one two three", "max_tokens": 1}
COLD = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


async def test_a_header_chooses_the_engine_as_in_vllm() -> None:
    node = SimNode(NodeConfig(role="prefill", timing=NO_TIMING, data_parallel_size=3))
    url = await node.start()
    engines = []
    async with aiohttp.ClientSession(url) as http:
        for rank in ("2", "0", "1", "2"):
            headers = {"X-data-parallel-rank": rank}
            async with http.post("/v1/completions", json=PROMPT | COLD, headers=headers) as answer:
                engines.append((await answer.json())["kv_transfer_params"]["remote_engine_id"])
        for rank, status in (("3", 400), ("-1", 400), ("x", 200)):
            headers = {"X-data-parallel-rank": rank}
            async with http.post("/v1/completions", json=PROMPT, headers=headers) as answer:
                assert answer.status == status
        async with http.get("/metrics") as answer:
            told = re.findall(r'vllm:num_requests_running\{engine="(\d)"', await answer.text())
    assert [e.rpartition("_dp")[2] for e in engines] == ["2", "0", "1", "2"]
    assert len({e.rpartition("_dp")[0] for e in engines}) == 1
    assert len({rank.address.port for rank in node.ranks}) == 3
    assert told == ["0", "1", "2"]
    before = node.engine.id
    node.restart()
    assert node.engine.id.endswith("_dp0")
    assert node.engine.id != before
    await node.stop()
