"""Settings that change while the router runs."""

import asyncio
import contextlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvreturn.config import Settings
from kvreturn.config_file import load_settings
from kvreturn.core.choice import Pressure
from kvreturn.core.handle import read_handle
from kvreturn.server import view
from kvreturn.server.reload import Reloader
from support.extproc import Request, Response, body_message, request_headers
from support.harness import DECODE, Harness, harness, settings
from support.nodes import chat, decode_events, handle

P1, P3, D2 = "10.0.0.1:8100", "10.0.0.3:8100", "10.0.0.4:8200"
END = Response(decode_events(params=handle()), node=DECODE)
NEXT = ("Hi", "Good morning", "And?")


class File:
    """A settings file, and a router that was started with it."""

    def __init__(self, path: Path, **changes: Any) -> None:  # noqa: ANN401 - settings as YAML has them
        self.path = path
        self.plain = settings(**changes).model_dump(by_alias=True, mode="json", exclude_unset=True)
        self.plain["secret"] = "a secret of these tests"
        self.write()
        self.router: Harness = harness(**changes)
        self.reloader = Reloader(self.router.world, self.load, self.load())

    def load(self) -> Settings:
        return load_settings(self.path, {})

    def write(self, **changes: Any) -> None:  # noqa: ANN401 - settings as YAML has them
        self.plain.update(changes)
        self.path.write_text(yaml.safe_dump(self.plain))

    def reload(self, **changes: Any) -> None:  # noqa: ANN401 - settings as YAML has them
        self.write(**changes)
        self.reloader.reload()

    def results(self) -> dict[str, float]:
        names = ("applied", "in_part", "refused", "unchanged")
        found = {name: self.router.metric("config_reloads_total", result=name) for name in names}
        return {name: value for name, value in found.items() if value}


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "kvreturn.yaml")


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO):
        yield


async def test_policies_of_turns_that_come(file: File, caplog: pytest.LogCaptureFixture) -> None:
    await file.router.turn("Hi")
    file.reload(proof="off")
    await file.router.turn(*NEXT)
    file.reload(proof="connector", models={"m": {"proof": "off"}})
    await file.router.turn(*NEXT)
    file.reload(models={})
    await file.router.turn(*NEXT)
    file.reload(limits={"min_tokens": 161})  # the handle has 160
    await file.router.turn("Ho")
    await file.router.turn("Ho", "Good morning", "And?")
    assert file.router.outcomes() == {"first_turn": 2, "disabled": 2, "hit": 1, "below_threshold": 1}
    assert "settings reloaded; changed: proof, models" in caplog.text
    assert file.results() == {"applied": 4}


async def test_a_turn_ends_with_the_settings_it_began_with(file: File) -> None:
    """Its body comes after the reload, and its answer after that."""
    await file.router.turn("Hi")
    envoy = file.router.envoy()
    stream = envoy._stream
    await stream.send(request_headers())
    await stream.receive()
    file.reload(proof="off", limits={"response_bytes": 1, "history": 1, "min_tokens": 1000}, store={"ttl": 1})
    await stream.send(body_message("request", chat(*NEXT), end=True))
    assert await stream.receive()
    await stream.half_close()
    assert await stream.receive() is None
    assert file.router.outcomes() == {"first_turn": 1, "hit": 1}


async def test_nodes_come_and_go(file: File) -> None:
    world = file.router.world
    world.prefill.started(P1, 50)
    file.reload(pools={"prefill": [P1, "10.0.0.9:8100"], "decode": [DECODE, D2]})
    assert world.prefill.load(P1) == 50
    assert "10.0.0.9:8100" in world.prefill
    assert P3 not in world.prefill
    assert world.prefill.choose() == "10.0.0.9:8100"
    await file.router.turn("Hi")
    file.reload(pools={"prefill": [P1], "decode": [D2]})
    await file.router.turn(*NEXT)  # what the D that has gone holds is not asked for
    assert file.router.outcomes() == {"first_turn": 1, "node_gone": 1}


async def test_nodes_that_envoy_is_not_told_of_are_trouble_until_they_have_gone(
    file: File, caplog: pytest.LogCaptureFixture
) -> None:
    before = file.plain["pools"]
    file.reload(pools={"prefill": before["prefill"], "decode": [D2]})
    assert f"settings reloaded; changed: pools; decode: +{D2} -{DECODE}" in caplog.text
    (told,) = view.trouble(file.router.world)
    assert told.startswith("Envoy does not know that nodes came or went: give it a new bootstrap")
    assert told.endswith(f"(decode: +{D2} -{DECODE})")
    assert "WARNING  kvreturn:reload.py" in caplog.text
    assert file.router.metric("config_envoy_outdated") == 1
    file.reload(pools=before)
    assert view.trouble(file.router.world) == []
    assert file.router.metric("config_envoy_outdated") == 0


async def test_envoy_is_told_of_nodes_by_the_router(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = File(tmp_path / "kvreturn.yaml", envoy={"endpoints": "router"})
    file.reload(pools={"prefill": [P1], "decode": [DECODE, D2]})
    assert f"decode: +{D2}" in caplog.text
    assert view.trouble(file.router.world) == []
    assert file.router.metric("config_envoy_outdated") == 0


async def test_limits(file: File) -> None:
    file.reload(limits={"live_turns": 1})
    envoys = [file.router.envoy() for _ in range(2)]
    await envoys[0].request(Request(pieces=[chat("Hi")]))
    await envoys[1].play(Request(pieces=[chat("Ho")]), END)
    assert envoys[1].client.status == 503
    file.reload(limits={"sessions_per_tenant": 1})
    await envoys[0].respond(END)
    await envoys[0].finish()
    await file.router.turn("Ho")
    await file.router.turn(*NEXT)
    assert file.router.outcomes()["over_limit"] == 1


async def test_the_breaker_keeps_what_it_has_seen(tmp_path: Path) -> None:
    file = File(tmp_path / "kvreturn.yaml", breaker={"failures": 5})
    judge, read = file.router.world.judge, read_handle(json.dumps(handle()).encode())
    for _ in range(2):
        judge.read_failed(read)
    assert not judge.open_breakers()
    file.reload(breaker={"failures": 2})
    assert judge.open_breakers() == ["engine-of-d"]
    file.reload(breaker={"failures": 3})
    assert not judge.open_breakers()
    judge.read_failed(read)
    assert judge.open_breakers() == ["engine-of-d"]


async def test_auto_can_be_switched_on_and_off(file: File) -> None:
    pressure = file.router.world.pressure
    async with pressure:
        assert not pressure._tasks
        file.reload(**{"return": "auto"})
        assert {node for node, _ in pressure._tasks} == {P1, P3, DECODE}
        pressure._note(P1, Pressure(0.5, 0, 0))
        file.reload(pools={"prefill": [P1], "decode": [DECODE]})
        assert {node for node, _ in pressure._tasks} == {P1, DECODE}
        assert pressure.of(P1)
        file.reload(**{"return": "lazy"})
        assert not pressure._tasks


RESTART = [
    ({"listen": "127.0.0.1:7"}, "listen"),
    ({"admin": "127.0.0.1:7"}, "admin"),
    ({"workers": 3, "store": {"url": "redis://u:pass-word@h"}}, "workers, store.url"),
    ({"secret": "an0ther"}, "secret"),
    ({"tenant_header": "x-t"}, "tenant_header"),
    ({"limits": {"request_bytes": 99}}, "limits.request_bytes"),
    ({"prefill": {"via": "envoy", "timeout": 3}}, "prefill.via, prefill.timeout"),
    ({"returns": {"pressure_interval": 3}}, "returns.pressure_interval"),
    ({"envoy": {"listen": "127.0.0.1:7"}}, "envoy.listen"),
]


@pytest.mark.parametrize(("changes", "named"), RESTART, ids=[r[1] for r in RESTART])
async def test_what_needs_a_restart_is_named_and_the_rest_is_applied(
    changes: dict[str, Any], named: str, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    before, text = file.load(), file.path.read_text()
    file.reload(proof="off", **changes)
    assert f"needs a restart: {named}\n" in caplog.text
    assert "settings reloaded; changed: proof\n" in caplog.text
    assert file.router.world.settings == before.model_copy(update={"proof": "off"})
    assert file.results() == {"in_part": 1}
    assert view.trouble(file.router.world) == [f"these settings wait for a restart: {named}"]
    assert file.router.metric("config_restart_needed") == 1
    assert not re.search("an0ther|pass-word", caplog.text)
    file.reload(proof="connector")
    assert caplog.text.count(f"needs a restart: {named}\n") == 2  # until it is restarted
    file.path.write_text(text)
    file.reloader.reload()
    assert view.trouble(file.router.world) == []
    assert file.router.metric("config_restart_needed") == 0


async def test_what_does_not_fit_what_must_stay_is_refused_as_a_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = File(tmp_path / "kvreturn.yaml")
    file.plain.pop("secret")
    file.write()
    file.reloader = Reloader(file.router.world, file.load, file.load())
    before = file.router.world.settings
    file.reload(proof="off", secret="s", tenant_cache_salt=True)
    assert "without a restart, secret cannot change, and then: tenant_cache_salt needs `secret`" in caplog.text
    assert file.router.world.settings is before
    assert file.results() == {"refused": 1}


async def test_a_bad_file_is_refused_with_its_line_and_the_old_one_stays(
    file: File, caplog: pytest.LogCaptureFixture
) -> None:
    before, read = file.router.world.settings, file.router.metric("config_last_success_timestamp_seconds")
    assert read > 1e9
    line = len(file.path.read_text().splitlines()) + 1
    good = file.path.read_text()
    for text, problem in [
        ("returns: {wiat: 1}\n", f"{line}: returns.wiat: unknown setting; did you mean `wait`?"),
        ("proof: [\n", f"{line + 1}: not YAML: did not find expected node content"),
    ]:
        file.path.write_text(good + text)
        file.reloader.reload()
        assert f"the settings stay as they were: {file.path}:{problem}" in caplog.text
        assert view.trouble(file.router.world) == [
            f"the changed settings are wrong, and the old ones are in use: {file.path}:{problem}"
        ]
        assert file.router.metric("config_refused") == 1
    file.path.unlink()
    file.reloader.reload()
    assert f"{file.path}: No such file or directory" in caplog.text
    assert file.router.world.settings is before
    assert file.results() == {"refused": 3}
    assert file.router.metric("config_last_success_timestamp_seconds") == read
    file.path.write_text(good)
    file.reloader.reload()
    assert file.results() == {"refused": 3, "unchanged": 1}
    assert view.trouble(file.router.world) == []
    assert file.router.metric("config_refused") == 0
    assert "Traceback" not in caplog.text


# --- the file is watched ---


@contextlib.asynccontextmanager
async def watched(file: File, path: Path) -> AsyncIterator[None]:
    watching = asyncio.create_task(file.reloader.watch(path, 0.01))
    await asyncio.sleep(0.03)
    try:
        yield
    finally:
        watching.cancel()


async def settled(file: File, **results: int) -> None:
    async with asyncio.timeout(5):
        while file.results() != results:  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert file.results() == results


async def test_a_file_is_reloaded_when_its_content_changes(file: File, caplog: pytest.LogCaptureFixture) -> None:
    async with watched(file, file.path):
        os.utime(file.path)  # touched, and the same
        await settled(file)
        file.write(proof="off")
        await settled(file, applied=1)
        new = file.path.with_suffix(".new")  # as editors do it
        new.write_text(file.path.read_text().replace("proof: 'off'", "proof: router"))
        new.replace(file.path)
        await settled(file, applied=2)
        file.path.unlink()
        await settled(file, applied=2)
        gone = f"{file.path} is not there"
        assert caplog.text.count(gone) == 1
        assert view.trouble(file.router.world) == [f"{gone}: the settings stay as they are"]
        assert file.router.metric("config_refused") == 1
        file.write(proof="nonsense")
        await settled(file, applied=2, refused=1)
        assert not any(gone in told for told in view.trouble(file.router.world))
        file.path.unlink()
        await settled(file, applied=2, refused=1)
        file.reloader.reload()
        file.write(proof="router")  # as it was
        await settled(file, applied=2, refused=2, unchanged=1)
        assert view.trouble(file.router.world) == []
        file.write(proof="off")
        await settled(file, applied=3, refused=2, unchanged=1)


async def test_a_file_that_is_being_written_is_not_looked_at(file: File) -> None:
    text = file.path.read_text() + "proof: 'off'\n"
    async with watched(file, file.path):
        with file.path.open("w") as f:
            for piece in re.findall("(?s).{1,9}", text):
                f.write(piece)
                f.flush()
                await asyncio.sleep(0.004)
        await settled(file, applied=1)


async def test_a_configmap_that_is_swapped_by_its_link_is_seen(tmp_path: Path) -> None:
    """Kubernetes: kvreturn.yaml -> ..data/kvreturn.yaml, ..data -> ..2026_11_29; the mtime may even be older."""
    for name in ("..1", "..2"):
        (tmp_path / name).mkdir()
    file = File(tmp_path / "..1" / "kvreturn.yaml")
    text = file.path.read_text()
    (tmp_path / "..2" / "kvreturn.yaml").write_text(text + "proof: 'off'\n")
    os.utime(tmp_path / "..2" / "kvreturn.yaml", (1, 1))
    (tmp_path / "..data").symlink_to("..1")
    path = tmp_path / "kvreturn.yaml"
    path.symlink_to("..data/kvreturn.yaml")
    file.path = path
    async with watched(file, path):
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")
        await settled(file, applied=1)
    assert file.router.world.settings.proof == "off"
