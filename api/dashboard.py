"""The status page: one static file that asks this service's own routes."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

# Only its own script and style, no other origin, not inside another page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'"


def routes() -> list[web.RouteDef]:
    return [web.get("/", page)]


async def page(_: web.Request) -> web.Response:
    text = (files("api") / "dashboard.html").read_text(encoding="utf-8")
    return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": _POLICY})
