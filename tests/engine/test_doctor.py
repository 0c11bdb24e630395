"""`kvreturn doctor` against real vLLM nodes, with our connector and with vLLM's own."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from engine.conftest import Engine, front, note
from engine.test_misuse import until
from kvreturn.demo.stack import free_addresses
from kvreturn.doctor import keys
from kvreturn.doctor.model import Finding, Status
from kvreturn.doctor.run import Plan, diagnose

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


async def doctor(engine: Engine, folder: Path) -> dict[str, list[Finding]]:
    """Findings by check. The router is another one than that of the other tests: it has an admin port."""
    addresses = [engine.nodes[name].address for name in ("prefill", "decode")]
    admin = free_addresses(1)[0]

    def sink(name: str, line: str) -> None:
        note(engine.lines, name, line)

    async with front(addresses[:1], addresses[1:], sink, admin=admin) as (router, _):
        path = folder / "kvreturn.yaml"
        plain = router.world.settings.model_dump(
            mode="json", by_alias=True, include={"listen", "admin", "pools", "envoy"}
        )
        path.write_text(yaml.safe_dump(plain))
        diagnosis = await diagnose(Plan(path, seconds=15.0))
    found: dict[str, list[Finding]] = {}
    for finding in diagnosis.findings:
        print(f"{finding.status:<7} {finding.check}: {finding.subject}: {finding.found}")
        found.setdefault(finding.check, []).append(finding)
    return found


@pytest_asyncio.fixture(loop_scope="session")
async def stock(engine: Engine) -> AsyncIterator[None]:
    """Both nodes run vLLM's own connector. Our plugin is still there, so streams carry handles."""

    async def change(name: str, *, stock: bool) -> None:
        await engine.stop(name)
        await engine.start(name, stock=stock)

    await asyncio.gather(*(change(name, stock=True) for name in ("prefill", "decode")))
    yield
    await asyncio.gather(*(change(name, stock=False) for name in ("prefill", "decode")))


async def test_our_connector_on_both_sides_is_well(engine: Engine, tmp_path: Path) -> None:
    pins = await engine.metric(engine.d, "kvreturn_pins")
    found = await doctor(engine, tmp_path)
    assert [f for all_of in found.values() for f in all_of if f.status is Status.FAIL] == []
    good = (
        "streams",
        "proof",
        "gateway",
        "gateway.outcome",
        "ttl",
        "versions.vllm",
        "versions.connector",
        "flags.secret",
    )
    assert {check: [f.status for f in found[check]] for check in good} == {check: [Status.OK] for check in good}
    # What the fixtures make so: TCP on loopback, no prefix cache on P.
    assert {f.status for f in found["transport"]} == {Status.OK, Status.WARN}
    assert Status.WARN in {f.status for f in found["flags.prefix_caching"]}
    await until(engine, engine.d, "kvreturn_pins", pins)


async def test_stock_nodes_are_told_from_ours(engine: Engine, stock: None, tmp_path: Path) -> None:
    del stock
    found = await doctor(engine, tmp_path)
    assert [f.found.rpartition(", ")[2] for f in found["node.connector"]] == ["stock NixlConnector"] * 2
    assert [f.status for f in found["streams"]] == [Status.OK]
    assert [f.status for f in found["proof"]] == [Status.SKIPPED]
    assert {f.status for f in found["flags.connector"]} == {Status.FAIL, Status.WARN}
    assert any(
        f.status is Status.OK and engine.nodes["prefill"].address in f.found
        for f in found["flags.bidirectional_kv_xfer"]
    )
    assert [f.status for f in found["flags.block_size"]] == [Status.OK]


async def test_the_known_keys_are_those_that_this_vllm_reads(engine: Engine) -> None:
    (folder,) = engine.python.parent.parent.glob("lib/python3*/site-packages/vllm/distributed/kv_transfer")
    nixl = [p.read_text() for p in (folder / "kv_connector/v1/nixl").glob("*.py")]
    read = {key for text in nixl for key in re.findall(r'get_from_extra_config\(\s*"([a-z_0-9]+)"', text)}
    assert read == keys.EXTRA
    (config,) = folder.parent.parent.glob("config/kv_transfer.py")
    body = config.read_text().partition("class KVTransferConfig")[2]
    assert set(re.findall(r"^    ([a-z_]+): ", body, re.MULTILINE)) == keys.TRANSFER
