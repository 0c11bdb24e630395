import pytest

from kvreturn.store.url import StoreURL, parse_store_url

URLS = [
    ("redis://h", StoreURL("single", (("h", 6379),))),
    ("redis://127.0.0.1:6380/", StoreURL("single", (("127.0.0.1", 6380),))),
    ("redis://[fd00::1]:6380/2", StoreURL("single", (("fd00::1", 6380),), db=2)),
    ("redis://[fd00::1]", StoreURL("single", (("fd00::1", 6379),))),
    (
        "redis://kv:p%40ss%3Aword%2F@h:1/3",
        StoreURL("single", (("h", 1),), db=3, username="kv", password="p@ss:word/"),
    ),
    ("redis://:only@h", StoreURL("single", (("h", 6379),), password="only")),
    (
        "rediss://h?ssl_ca_certs=/etc/ca.pem&ssl_certfile=/c&ssl_keyfile=/k",
        StoreURL(
            "single",
            (("h", 6379),),
            tls=True,
            options={"ssl_ca_certs": "/etc/ca.pem", "ssl_certfile": "/c", "ssl_keyfile": "/k"},
        ),
    ),
    ("unix:///run/redis.sock", StoreURL("unix", path="/run/redis.sock")),
    ("unix://u:p@/r.sock?db=4", StoreURL("unix", path="/r.sock", db=4, username="u", password="p")),
    (
        "redis+sentinel://u:p@s1,s2:26380/main/1?sentinel_username=su&sentinel_password=sp",
        StoreURL(
            "sentinel",
            (("s1", 26379), ("s2", 26380)),
            service="main",
            db=1,
            username="u",
            password="p",
            options={"sentinel_username": "su", "sentinel_password": "sp"},
        ),
    ),
    ("rediss+sentinel://s/main", StoreURL("sentinel", (("s", 26379),), tls=True, service="main")),
    ("redis+cluster://a,b:7000", StoreURL("cluster", (("a", 6379), ("b", 7000)))),
    ("rediss+cluster://a", StoreURL("cluster", (("a", 6379),), tls=True)),
]


@pytest.mark.parametrize(("text", "expected"), URLS, ids=[u[0] for u in URLS])
def test_what_a_url_says(text: str, expected: StoreURL) -> None:
    assert parse_store_url(text) == expected


WRONG = [
    ("", "write it as redis://..., rediss://..., unix://..."),
    ("h:6379", "write it as"),
    ("http://h:6379", "write it as"),
    ("redis:///0", "no host:port"),
    ("redis://h:99999", "no host:port"),
    ("redis://h/zero", "the database is a number"),
    ("redis://h/0/1", "the database is a number"),
    ("redis://a,b", "several hosts need redis+sentinel:// or redis+cluster://"),
    ("redis://h?ssl_ca_certs=/ca.pem", "redis:// takes no option ssl_ca_certs"),
    ("rediss://h?ssl_check_hostname=false", "rediss:// takes no option ssl_check_hostname"),
    ("redis+sentinel://s", "name the primary"),
    ("redis+cluster://a/1", "a cluster has no databases"),
    ("unix://", "unix:///absolute/path"),
    ("unix://run/redis.sock", "unix:///absolute/path"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[w[0] or "empty" for w in WRONG])
def test_what_is_wrong_with_a_url(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as info:
        parse_store_url(text)
    assert message in str(info.value)


@pytest.mark.parametrize("text", ["redis://u:hunter2@h/x", "http://u:hunter2@h", "redis://u:hunter2@a,b"])
def test_no_message_tells_the_password(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as info:
        parse_store_url(text)
    assert "hunter2" not in str(info.value)
    assert "hunter2" not in repr(parse_store_url("redis://u:hunter2@h"))
