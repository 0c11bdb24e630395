"""Nodes from Kubernetes: list and watch of a Service's EndpointSlices (API group discovery.k8s.io/v1).

Three requests and a stream of lines need no client library; those that there are bring a model of the whole API.
"""

import asyncio
import json
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from kvreturn.settings.pools import EndpointSlices
from kvreturn.upstream.members import Members

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_WATCH = 240  # seconds after which the server is to end a watch
_SILENCE = _WATCH + 30  # seconds after which a connection is dead
_LIST = 10.0  # seconds for a list
_BACKOFF = (0.5, 30.0)  # seconds, first and longest
_SHORT = 1.0  # a watch that ends sooner is no good one
_LINE = 8 << 20  # bytes of one event: a slice has up to 1000 endpoints
_GONE = 410
Json = Mapping[str, Any]


class ExpiredError(Exception):
    """The server no longer has the changes since our version: list again."""


class ApiError(Exception):
    """The API server refuses; the message says why."""


class SliceWatch:
    """Keeps up with the endpoints of one Service.

    Args:
        settings: which Service, and where.
        members: gets what is found.
    """

    def __init__(self, settings: EndpointSlices, members: Members) -> None:
        self._api = _Api(settings)
        self._settings = settings
        self._members = members
        self._slices: dict[str, Json] = {}
        self._version: str | None = None
        self._name = f"service {settings.service}"

    async def run(self) -> None:
        """Watch, for ever."""
        failures = 0
        async with aiohttp.ClientSession(read_bufsize=_LINE) as session:
            while True:
                begun = time.monotonic()
                try:
                    if self._version is None:
                        await self._list(session)
                    await self._watch(session)
                except ExpiredError:
                    self._version = None
                except Exception as e:  # noqa: BLE001 - whatever it was, the next try may do better
                    self._members.unknown("failed", self._name, str(e) or type(e).__name__)
                failures = failures + 1 if time.monotonic() - begun < _SHORT else 0
                if failures:
                    first, longest = _BACKOFF
                    await asyncio.sleep(min(first * 2 ** (failures - 1), longest) * random.uniform(0.5, 1))  # noqa: S311 - no secret

    async def _list(self, session: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(_LIST), self._api.get(session, {}) as response:
            found = json.loads(await _body(response))
        self._slices = {item["metadata"]["name"]: item for item in found.get("items") or []}
        self._version = found["metadata"]["resourceVersion"]

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        """Follow changes until the server ends the stream.

        Raises:
            ExpiredError: what has changed since is not known any more.
        """
        assert self._version is not None
        query = {
            "watch": "1",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH),
        }
        async with self._api.get(session, query) as response:
            if response.status != 200:  # noqa: PLR2004
                await _body(response)
            self._changed()
            async for line in _lines(response):
                event = json.loads(line)
                what, thing = event["type"], event["object"]
                if what == "ERROR":
                    if thing.get("code") == _GONE:
                        raise ExpiredError
                    raise ApiError(thing.get("message") or "the watch ended with an error")
                self._version = thing["metadata"]["resourceVersion"]
                name = thing["metadata"].get("name")
                if what == "DELETED":
                    self._slices.pop(name, None)
                elif what in {"ADDED", "MODIFIED"}:
                    self._slices[name] = thing
                if what != "BOOKMARK":
                    self._changed()

    def _changed(self) -> None:
        serving, terminating = read_slices(self._slices.values(), self._settings.port)
        if serving or terminating:
            self._members.well(self._name)
            self._members.are(serving | terminating, terminating)
        else:
            self._members.unknown("empty", self._name, "no endpoint of it is ready")


def read_slices(slices: Iterable[Json], port: int | str) -> tuple[set[str], set[str]]:
    """The addresses of a Service's endpoints.

    An endpoint that terminates but still serves drains: it finishes what it has, and what it holds can be read. One
    that is not ready is no node: it has not started yet, or says itself that it cannot serve.

    Args:
        slices: EndpointSlice objects.
        port: name or number.

    Returns:
        Those that are ready, and those that terminate; `ip:port`.
    """
    found = {family: (set[str](), set[str]()) for family in ("IPv4", "IPv6")}
    for one in slices:
        numbers = [p.get("port") for p in one.get("ports") or [] if port in {p.get("name"), p.get("port")}]
        family = one.get("addressType")
        if not (numbers and numbers[0] and family in found):
            continue
        ready, terminating = found[family]
        for endpoint in one.get("endpoints") or []:
            host = endpoint["addresses"][0]  # the others are the same endpoint
            address = f"[{host}]:{numbers[0]}" if family == "IPv6" else f"{host}:{numbers[0]}"
            conditions = endpoint.get("conditions") or {}
            if conditions.get("terminating"):
                if conditions.get("serving") is not False:
                    terminating.add(address)
            elif conditions.get("ready") is not False:  # not said: ready
                ready.add(address)
    ready, terminating = found["IPv4"] if any(found["IPv4"]) else found["IPv6"]
    return ready, terminating - ready


class _Api:
    """Requests for the slices of one Service."""

    def __init__(self, settings: EndpointSlices) -> None:
        inside = settings.server is None
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        self._server = settings.server or f"https://{f'[{host}]' if ':' in host else host}:{port or 443}"
        self._token = Path(settings.token_file or _ACCOUNT / "token") if inside or settings.token_file else None
        ca = settings.ca_file or (_ACCOUNT / "ca.crt" if inside else None)
        self._ca = ca
        self._settings = settings
        self._query = {"labelSelector": f"kubernetes.io/service-name={settings.service}"}

    def get(self, session: aiohttp.ClientSession, query: Mapping[str, str]) -> "aiohttp.client._RequestContextManager":
        """A request; raises OSError where a file or the cluster is not there."""
        namespace = self._settings.namespace or (_ACCOUNT / "namespace").read_text().strip()
        headers = {"accept": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token.read_text().strip()}"  # it changes every hour
        return session.get(
            f"{self._server}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
            params={**self._query, **query},
            headers=headers,
            ssl=ssl.create_default_context(cafile=self._ca) if self._ca else True,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_SILENCE),
            allow_redirects=False,
        )


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = await response.read()
    if response.status == _GONE:
        raise ExpiredError
    if response.status != 200:  # noqa: PLR2004
        raise ApiError(f"the API server answers {response.status}: {body[:200].decode(errors='replace')}")
    return body


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of a stream, of any length."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
