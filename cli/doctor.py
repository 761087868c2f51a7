"""`polar doctor`: what works here, and what to do about what doesn't."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from cli.common import BAD, OK, out, print_json, settings
from cli.stack import get_json
from cli.terminal import one_line
from polar.config import Model, Settings
from polar.objects import open_objects
from polar.store.connection import connect, redact
from runtimes.registry import allowed, load_runtime


def doctor(
    config: Annotated[str | None, typer.Option("--config")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")] = False,
) -> None:
    """Check broker, object store, engine, proxy and runtimes. Exit code 1 if something that is configured fails."""
    s = settings(config)
    checks = [
        _check("broker", lambda: _broker(s)),
        _check("objects", lambda: _objects(s)),
        *[_check(f"engine:{name}", partial(_engine, u, name, m)) for name, m in s.models.items() for u in m.engines],
        _check("proxy", lambda: _proxy(s)),
        *[_check(f"runtime:{n}", partial(_runtime, n, s)) for n in allowed(s)],
    ]
    if as_json:
        print_json({"ok": all(c["status"] != "fail" for c in checks), "checks": checks})
    else:
        colours = {"ok": "green", "fail": "red", "absent": "yellow"}
        for c in checks:
            out.print(f"{c['status']:6}", style=colours[c["status"]], end=" ")
            out.print(f"{c['name']:18} {one_line(c['detail'])}", soft_wrap=True)
    raise typer.Exit(BAD if any(c["status"] == "fail" for c in checks) else OK)


def _check(name: str, probe: Callable[[], tuple[str, str]]) -> dict[str, str]:
    try:
        status, detail = probe()
    except Exception as e:
        status, detail = "fail", f"{type(e).__name__}: {e}"
    return {"name": name, "status": status, "detail": detail}


def _broker(s: Settings) -> tuple[str, str]:
    if not s.broker:
        return "absent", "not configured: 'polar up' and 'polar demo' bring their own; set POLAR_BROKER for a cluster"
    info = connect(s.store_url, socket_timeout=5).info()
    policy = connect(s.store_url).config_get("maxmemory-policy").get("maxmemory-policy", "?")
    detail = f"{redact(s.store_url)} (version {info.get('valkey_version') or info.get('redis_version')}, {policy})"
    if policy != "noeviction":
        return "fail", f"{detail}: set maxmemory-policy noeviction, or sessions may be evicted"
    if not int(info.get("aof_enabled", 0)):
        return "fail", f"{detail}: turn appendonly on, or a restart loses sessions"
    return "ok", detail


def _objects(s: Settings) -> tuple[str, str]:
    store = open_objects(s.objects_url)
    key = "doctor/probe"
    store.delete(key)
    if not store.put_if_absent(key, b"1") or store.put_if_absent(key, b"2") or store.get(key) != b"1":
        return "fail", f"{s.objects_url}: conditional writes don't work there, so results could be overwritten"
    store.delete(key)
    return "ok", s.objects_url.split("?")[0]


def _engine(url: str, name: str, model: Model) -> tuple[str, str]:
    variable = model.api_key_env
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        return "fail", f"{url}: models.{name}.api_key_env: the variable {variable} is not set here"
    try:
        if model.protocol == "sglang":
            info = get_json(f"{url}/model_info", timeout=5, key=key)
            return "ok", f"{url}: {info.get('model_path')}, weight version {info.get('weight_version')}"
        served = get_json(f"{url.rstrip('/').removesuffix('/v1')}/v1/models", timeout=5, key=key)
        return "ok", f"{url}: serves {', '.join(m['id'] for m in served.get('data', [])) or 'no model'}"
    except urllib.error.HTTPError as e:
        if e.code not in (401, 403):
            raise
        hint = (
            f"refuses the key in {variable}"
            if variable
            else f"wants a key: name its variable in models.{name}.api_key_env"
        )
        return "fail", f"{url}: {hint}"


def _proxy(s: Settings) -> tuple[str, str]:
    if not s.proxy_url:
        return "absent", "not configured: set proxy_url, or use 'polar up'"
    try:
        urllib.request.urlopen(f"{s.proxy_url}/v1/models", timeout=5)
    except urllib.error.HTTPError as e:
        if e.code == 401:
            return "ok", f"{s.proxy_url}: answers, and refuses who has no capability"
        raise
    return "fail", f"{s.proxy_url}: answers without a capability; is that Polar's proxy?"


def _runtime(name: str, s: Settings) -> tuple[str, str]:
    ok, detail = load_runtime(name, s).available()
    return "ok" if ok else "absent", detail
