"""One URL syntax for every Redis: redis://, rediss://, unix:///path?db=0, sentinel://host:port[,host:port]/service?db=0."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio

from polar.errors import InvalidConfig

SCHEMES = ("redis", "rediss", "unix", "sentinel")
# Without a socket timeout a client waits forever on a server that vanished without closing the connection.
OPTIONS: dict[str, Any] = dict(
    socket_timeout=30, socket_connect_timeout=5, socket_keepalive=True, health_check_interval=10, protocol=2
)


def parse(url: str) -> tuple[str, Any]:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise InvalidConfig(f"broker/store URL '{redact(url)}': unknown scheme; allowed: {', '.join(SCHEMES)}")
    return parts.scheme, parts


def connect(url: str, **extra: Any) -> redis.Redis:
    """A blocking client. `extra` overrides the default options."""
    return _client(url, redis, redis.Sentinel, extra)


def connect_async(url: str, **extra: Any) -> redis.asyncio.Redis:
    from redis.asyncio.sentinel import Sentinel

    return _client(url, redis.asyncio, Sentinel, extra)


def _client(url: str, module: Any, sentinel: Any, extra: dict[str, Any]) -> Any:
    scheme, _ = parse(url)
    options = OPTIONS | extra
    if scheme == "unix":
        options.pop("socket_keepalive")
    if scheme != "sentinel":
        return module.Redis.from_url(url, **options)
    hosts, service, db, password = _sentinel(url)
    pool = sentinel(hosts, socket_connect_timeout=5, socket_timeout=5)
    return pool.master_for(service, db=db, password=password, **options)


def _sentinel(url: str) -> tuple[list[tuple[str, int]], str, int, str | None]:
    parts = urlsplit(url)
    userinfo, _, hostlist = parts.netloc.rpartition("@")
    hosts = []
    for item in hostlist.split(","):
        host, _, port = item.partition(":")
        hosts.append((host, int(port or 26379)))
    service = parts.path.strip("/")
    if not service:
        raise InvalidConfig(
            f"sentinel URL '{redact(url)}': the service name is missing, as in sentinel://host:26379/mymaster"
        )
    db = int(parse_qs(parts.query).get("db", ["0"])[0])
    return hosts, service, db, userinfo.rpartition(":")[2] or None


def for_celery(url: str) -> tuple[str, dict[str, Any]]:
    """The broker URL and transport options as kombu spells them."""
    scheme, parts = parse(url)
    if scheme == "unix":
        db = parse_qs(parts.query).get("db", ["0"])[0]
        return f"redis+socket://{parts.path}?virtual_host={db}", {}
    if scheme == "sentinel":
        hosts, service, db, password = _sentinel(url)
        auth = f":{password}@" if password else ""
        return ";".join(f"sentinel://{auth}{h}:{p}/{db}" for h, p in hosts), {"master_name": service}
    return url, {}


def redact(url: str) -> str:
    """The URL without its password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()
