"""The URL of a Redis or Valkey session store.

    redis://[user:password@]host[:6379][/db]                       one server
    unix://[user:password@]/path[?db=0]                            one server, by its socket
    redis+sentinel://[user:password@]host[:26379],.../service[/db]  a primary that sentinels watch
    redis+cluster://[user:password@]host[:6379],...                a cluster, by some of its nodes

`rediss` in place of `redis` is TLS, to sentinels too. User and password are percent-encoded.
"""

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, unquote

from kvreturn.core.address import split_address

Form = Literal["single", "unix", "sentinel", "cluster"]
_FORMS: dict[str, tuple[Form, bool]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "unix": ("unix", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_TLS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}
_OPTIONS: dict[Form, set[str]] = {
    "single": set(),
    "unix": {"db"},
    "sentinel": {"sentinel_username", "sentinel_password"},
    "cluster": set(),
}
_SHAPE = re.compile(r"([a-z+]+)://(?:([^/@]*)@)?([^/?]*)(/[^?]*)?(?:\?(.*))?")
_PORTED = re.compile(r"(?:\[[^\]]*\]|[^:]*):\d+")


@dataclass(frozen=True, slots=True)
class StoreURL:
    """A store's URL, taken apart.

    Attributes:
        form: what it leads to.
        hosts: servers, sentinels or cluster nodes; empty for `unix`.
        tls: whether connections use TLS.
        path: of the socket, for `unix`.
        service: name of the primary, for `sentinel`.
        db: number of the database.
        username: ACL user.
        password: of the user.
        options: `ssl_ca_certs`, `ssl_certfile` and `ssl_keyfile` (paths), `sentinel_username`, `sentinel_password`.
    """

    form: Form
    hosts: tuple[tuple[str, int], ...] = ()
    tls: bool = False
    path: str = ""
    service: str = ""
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)


def parse_store_url(text: str) -> StoreURL:
    """Take a URL apart.

    Raises:
        ValueError: it is none of the forms above. The message does not tell the URL, which may hold a password.
    """
    match = _SHAPE.fullmatch(text)
    if match is None or match[1] not in _FORMS:
        raise ValueError(f"write it as {', '.join(f'{scheme}://...' for scheme in _FORMS)}; see the README")
    form, tls = _FORMS[match[1]]
    user, _, password = (match[2] or "").partition(":")
    options = dict(parse_qsl(match[5] or "", keep_blank_values=True))
    unknown = options.keys() - _OPTIONS[form] - (_TLS if tls else set())
    if unknown:
        raise ValueError(f"{match[1]}:// takes no option {', '.join(sorted(unknown))}")
    path = match[4] or ""
    service, db = "", options.pop("db", "") if form == "unix" else path.strip("/")
    if form == "sentinel":
        service, _, db = db.partition("/")
        if not service:
            raise ValueError("name the primary that the sentinels watch: .../SERVICE")
    if db and not (db.isascii() and db.isdigit()):
        raise ValueError("the database is a number")
    if form == "cluster" and db:
        raise ValueError("a cluster has no databases")
    if form == "unix" and (match[3] or len(path) < 2):  # noqa: PLR2004 - a slash and a name
        raise ValueError("write a socket as unix:///absolute/path")
    return StoreURL(
        form=form,
        hosts=() if form == "unix" else _hosts(match[3], 26379 if form == "sentinel" else 6379, form),
        tls=tls,
        path=path if form == "unix" else "",
        service=service,
        db=int(db or 0),
        username=unquote(user) or None,
        password=unquote(password) or None,
        options=options,
    )


def masked_store_url(text: str) -> str:
    """A URL that `parse_store_url` takes, without user, password and what its options say."""
    match = _SHAPE.fullmatch(text)
    assert match
    options = "&".join(f"{name}=***" for name in dict(parse_qsl(match[5] or "", keep_blank_values=True)))
    return f"{match[1]}://{'***@' if match[2] else ''}{match[3]}{match[4] or ''}{'?' if options else ''}{options}"


def _hosts(text: str, port: int, form: Form) -> tuple[tuple[str, int], ...]:
    hosts = text.split(",")
    if form == "single" and len(hosts) > 1:
        raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    return tuple(split_address(host if _PORTED.fullmatch(host) else f"{host}:{port}") for host in hosts)
