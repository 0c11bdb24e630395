"""Commands, settings and health checks of docker-compose.yml, as processes; redis-server may stand in for Valkey."""

from pathlib import Path

from support.composed import services, up
from support.deployed import LONG, outcomes
from support.gateway import CHAT, client
from support.harness import until
from support.redis import needs_redis
from support.talk import Talk

pytestmark = needs_redis


async def test_a_conversation_goes_on_when_one_of_the_two_routers_dies(tmp_path: Path) -> None:
    async with up(tmp_path) as there, client(f"http://{there['envoy'].own}:8000/v1") as sdk:
        routers = there["router-1"], there["router-2"]
        talk = Talk("Ada", CHAT, stream=True, more=LONG)
        for _ in range(3):
            await talk.turn(sdk)
        await until(lambda: len(outcomes(*routers)) == 3)
        assert outcomes(*routers) == ["first_turn", *["hit"] * 2]
        assert not [line for router in routers for line in router.lines if "envoy.lane" in line]  # nothing to warn of
        dead, alive = routers if outcomes(routers[0]) else reversed(routers)  # one that had turns of it
        await dead.kill()
        for _ in range(2):
            await talk.turn(sdk)
        await until(lambda: len(outcomes(*routers)) == 5)
        assert outcomes(*routers) == ["first_turn", *["hit"] * 4]
        service = services()[alive.name]
        assert await alive.stop(float(service["stop_grace_period"].removesuffix("s"))) == 0
