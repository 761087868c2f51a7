# ruff: noqa: E501
"""Where the attacks are run: through the whole pipeline, and once more without any of its protections."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evaluators.history import hide_future
from polar.codec import unpack
from polar.config import Settings
from polar.result import SessionResult
from polar.sandbox import ProxyEndpoint, Runtime, Sandbox
from polar.store.capture import Grant, digest
from polar.task import AgentSpec, EvaluatorSpec, Exec, Prepare, RetryPolicy, RuntimeSpec, TaskRequest
from runtimes.docker import DockerRuntime
from runtimes.local import LocalRuntime
from runtimes.prepare import run_prepare
from tests.evaluators.repos import PYTHON, REPO, image, no_local_python, writes
from tests.hostile.attacks import ATTACKS, F2P, Attack
from tests.hostile.listener import Listener
from tests.workers.cluster import Cluster

LIMIT = 32 << 20  # bytes kept of one artifact
_BRANCH = (
    f"cd {REPO} && g='git -c user.name=t -c user.email=t@t' && $g checkout -qb fix && {writes(PYTHON.gold)} && "
    "$g commit -qam fix && $g tag v2 && $g checkout -q main"
)


def missing(backend: str) -> str:
    """Why attacks can't be run there; empty if they can."""
    if backend == "docker":
        ok, why = DockerRuntime(Settings()).available()
        return "" if ok else f"no Docker engine: {why}"
    return no_local_python()


class Arena:
    """One back-end. `protected` and `unprotected` tell by attack's name whether it won, and how it went."""

    def __init__(self, backend: str, folder: Path):
        self.backend, self.folder = backend, folder
        folder.mkdir(parents=True, exist_ok=True)
        fields: dict[str, Any] = {"backend": backend, "workdir": REPO}
        if backend == "docker":
            fields |= {"image": image(), "pids": 100, "memory_mb": 1024}
            self.python = "python3"
        else:
            fields |= {"options": {"isolation": "bwrap"}}
            self.python = sys.executable
        self.fields = fields
        self.host = self.folder / "host"
        self.host.mkdir()
        (self.host / "secret").write_bytes(uuid.uuid4().bytes)
        self.mark = f"{31_000 + uuid.uuid4().int % 10**4}.{uuid.uuid4().int % 10**9:09d}"

    # -- with everything that protects

    def protected(self, attacks: list[Attack] = ATTACKS) -> dict[str, tuple[bool, str]]:
        sockets = Path(tempfile.mkdtemp(prefix="ph"))
        proxy, plane = Listener(str(sockets / "p")), Listener()
        try:
            proxy_settings = {"proxy_url": f"http://127.0.0.1:{proxy.port}", "proxy_socket": str(sockets / "p")}
            with Cluster(
                self.folder / "c",
                namespace=f"h{uuid.uuid4().hex[:12]}",
                lease_seconds=10.0,
                node_timeout_seconds=30.0,
                artifact_limit_bytes=LIMIT,
                **proxy_settings,
            ) as c:
                c.workers(slots=4)
                words = {
                    "PORT": str(plane.port),
                    "STORE": str(c.sockets / "s"),
                    "MARK": self.mark,
                    "VICTIM": "victim.s0",
                    "HOST": str(self.host),
                }
                ids = c.submit(*(self._task(n, a, words) for n, a in enumerate(attacks)))
                results = {r.task_id: r for r in c.wait(ids, 1500)}
                out = {}
                for n, a in enumerate(attacks):
                    r = results[f"a{n}"]
                    out[a.name] = (self._won(a, r, c, proxy, plane), _how(r))
                return out
        finally:
            proxy.close()
            plane.close()
            shutil.rmtree(sockets, ignore_errors=True)

    def _task(self, n: int, a: Attack, words: dict[str, str]) -> TaskRequest:
        if a.judge == "swe":
            config = PYTHON.config(self.python, **_filled(a.config, self.python))
            evaluator = EvaluatorSpec(name="swe", config=config)
        else:
            command = f"PYTHONPATH=src {self.python} -m pytest -q tests && mkdir -p out && echo 1 >out/reward.txt || echo 0 >out/reward.txt"
            files = [{"target": f"{REPO}/{p}", "content": t} for p, t in PYTHON.tests.items()]
            report = {"kind": "reward_file", "path": f"{REPO}/out/reward.txt"}
            config = {"command": f"mkdir -p out; {command}", "collect": [REPO], "files": files, "report": report}
            evaluator = EvaluatorSpec(name="test_on_output", config=config)
        return TaskRequest(
            task_id=f"a{n}",
            instruction="fix it",
            agent=AgentSpec(harness="shell", command=_words(a.command, words)),
            runtime=RuntimeSpec(**self.fields, prepare=self._prepare(a, hidden=True)),
            evaluator=evaluator,
            artifacts=a.artifacts,
            retry=RetryPolicy(max_attempts=1),
            timeout_seconds=120,
        )

    def _prepare(self, a: Attack, *, hidden: bool) -> list[Prepare]:
        steps = PYTHON.prepare()
        if a.history:
            steps += [Exec(command=_BRANCH), *([Exec(command=hide_future(REPO))] if hidden else [])]
        return steps

    def _won(self, a: Attack, r: SessionResult, c: Cluster, proxy: Listener, plane: Listener) -> bool:
        if r.reward is not None and r.reward > 0:
            return True
        if a.goal in ("escape", "reward"):
            return r.reward is None
        if a.goal == "survive":
            return _alive(self.mark) > 0
        if a.goal == "big":
            return sum(x.size for x in r.artifacts) > 3 * LIMIT or r.reward is None
        if a.goal == "links":
            return any(self._leaks(c, x.key) for x in r.artifacts if x.name in a.artifacts)
        if a.goal == "plane":
            return bool(plane.seen)
        if a.goal == "store":
            return c.store.redis.get("hostile:won") is not None
        if a.goal == "proxy":
            guesses = {m[1] for p in proxy.seen if (m := re.match(r"/s/([^/]*)/", p))}
            grants = [c.store.redis.get(c.store.keys.capability(digest(g))) for g in guesses]
            return any(unpack(g, Grant).session_id != r.session_id for g in grants if g)
        assert a.goal == "outside"
        return os.path.exists("/tmp/evil/words.py") or r.reward is None

    # -- without

    def unprotected(self, attacks: list[Attack] = ATTACKS) -> dict[str, tuple[bool, str]]:
        """The same attacks against a judge that works where the agent did, at the same time, and believes what it reads."""
        return {a.name: self._bare(a) for a in attacks}

    def _bare(self, a: Attack) -> tuple[bool, str]:
        settings = Settings(data_dir=str(self.folder / "bare"))
        plain = a.goal in ("plane", "store")
        runtime: Runtime = DockerRuntime(settings) if self.backend == "docker" and not plain else LocalRuntime(settings)
        spec = RuntimeSpec(backend="local", options={"isolation": "none"}) if plain else RuntimeSpec(**self.fields)
        with contextlib.ExitStack() as stack:
            plane = Listener()
            sockets = Path(tempfile.mkdtemp(prefix="pc"))
            store = Listener(str(sockets / "s"))
            stack.callback(plane.close)
            stack.callback(store.close)
            stack.callback(shutil.rmtree, sockets, ignore_errors=True)
            endpoint = ProxyEndpoint(url=f"http://127.0.0.1:{plane.port}", socket=None)
            box = runtime.create(spec, labels={"t": "t"}, proxy=endpoint if a.goal == "proxy" else None, timeout=60)
            stack.callback(box.destroy)
            if not plain:
                run_prepare(box, self._prepare(a, hidden=False), timeout=60, fetch=Path)
            words = {"PORT": str(plane.port), "STORE": str(sockets / "s"), "MARK": self.mark, "VICTIM": "victim.s0"}
            words["HOST"] = str(self.host)
            env = {"OPENAI_BASE_URL": f"{box.ref.proxy_url}/s/mine/v1"}
            said = box.exec(_words(a.command, words), env=env, timeout=60).output
            if a.goal == "plane":
                return bool(plane.seen), f"{len(plane.seen)} calls"
            if a.goal == "store":
                return bool(store.seen), f"{len(store.seen)} calls"
            if a.goal == "proxy":
                # Addresses by session id, as they are where no secret is in them.
                return any("/s/victim.s0/" in p for p in plane.seen), f"{len(plane.seen)} calls"
            if a.goal == "survive":
                return _alive(self.mark) > 0, f"{_alive(self.mark)} alive"
            if a.goal == "big":
                size = int(box.exec(f"du -sb --apparent-size {REPO} | cut -f1", timeout=60).output)
                return size > 3 * LIMIT, f"{size} bytes"
            if a.goal == "links":
                return self._bare_links(box, a), "copied as they are"
            if a.goal == "outside":
                box.exec(f"mkdir -p /tmp/evil; cd {REPO}; git apply --unsafe-paths --directory= model.patch || git apply --unsafe-paths --include='*words.py' model.patch", timeout=60)  # fmt: skip
                return box.exec("test -e /tmp/evil/words.py", timeout=60).exit_code == 0, "applied"
            return self._bare_judge(box, a, said)

    def _bare_judge(self, box: Sandbox, a: Attack, said: bytes) -> tuple[bool, str]:
        config = PYTHON.config(self.python, **_filled(a.config, self.python))
        box.write("/tmp/judge.diff", config["test_patch"].encode())
        script = f"""cd {REPO}; [ ! -e model.patch ] || git apply model.patch; git apply /tmp/judge.diff
            git -c user.name=j -c user.email=j@j add -A; git -c user.name=j -c user.email=j@j commit -qm final; [ -f "$HOME/.profile" ] && . "$HOME/.profile"
            {config["test_command"].replace(self.python, "python3" if "shim" in a.name else self.python)}"""
        r = box.exec(script, env={"POLAR_REPORT": "/tmp/report"}, timeout=15, output_limit=1 << 20)
        text = (said + r.output).decode("utf-8", "replace")
        if a.judge == "reward_file":
            reward = box.exec(f"cat {REPO}/out/reward.txt", timeout=60).output.strip()
            return reward == b"1", f"reward {reward!r}"
        if a.goal == "escape" and (
            r.exit_code is None or r.exit_code in (137, 143) or not re.search("passed|failed", text)
        ):
            return True, f"no verdict (exit code {r.exit_code})"
        text += box.exec("cat /tmp/report 2>/dev/null", timeout=60).output.decode("utf-8", "replace")
        passed = all(
            f"PASSED {t}\n" in text or f"XFAIL {t}" in text or f'name="{t.rpartition("::")[2]}"/>' in text for t in F2P
        )
        nothing = r.exit_code in (0, 5) and not re.search(r"^(FAILED|ERROR)", text, re.MULTILINE)
        return (
            passed or nothing,
            f"exit code {r.exit_code}, {'all passed' if passed else 'nothing failed' if nothing else 'failed'}",
        )

    # -- a file of the host that no sandbox is shown

    def _leaks(self, c: Cluster, key: str) -> bool:
        """Does what was kept hold a file of the host, or a link that leads out of it?"""
        target = self.folder / "kept"
        c.objects.get_file(key, target)
        secret = (self.host / "secret").read_bytes()
        try:
            if not tarfile.is_tarfile(target):
                return target.read_bytes() in (secret, Path("/proc/1/environ").read_bytes())
            with tarfile.open(target) as tar:
                for m in tar:
                    if m.issym():
                        depth = m.name.strip("./").count("/")
                        ups = m.linkname.split("/").count("..")
                        if m.linkname.startswith("/") or ups > depth:
                            return True
                    if m.isreg() and (f := tar.extractfile(m)) and f.read() == secret:
                        return True
            return False
        finally:
            target.unlink()

    def _bare_links(self, box: Sandbox, a: Attack) -> bool:
        """Unpacked on the host as the agent packed it, and read."""
        secret = (self.host / "secret").read_bytes()
        with tempfile.TemporaryDirectory() as temp:
            data = box.exec(["tar", "-c", *a.artifacts], timeout=60, output_limit=1 << 24).output
            (Path(temp) / "x.tar").write_bytes(data)
            target = Path(temp) / "t"
            with tarfile.open(Path(temp) / "x.tar") as tar:
                for m in tar:
                    with contextlib.suppress(Exception):
                        tar.extract(m, target, filter="fully_trusted")

            def files() -> Iterator[Path]:
                for name in ("a", f"c{self.host}/secret", "deep/b", "secret"):
                    yield target / a.artifacts[0] / name

            return any(f.is_file() and f.read_bytes() == secret for f in files())


def _filled(config: dict[str, Any], python: str) -> dict[str, Any]:
    return {k: v.replace("{python}", python) if isinstance(v, str) else v for k, v in config.items()}


def _words(command: str, words: dict[str, str]) -> str:
    for name, value in words.items():
        command = command.replace(f"@{name}@", value)
    return command


def _how(r: SessionResult) -> str:
    reason = (r.evaluation.report.get("reason") or "") if r.evaluation else ""
    error = r.error or (r.evaluation.error if r.evaluation else None)
    return f"{r.verdict} {r.reward} {reason}" + (f" {error.code}: {error.message[:200]}" if error else "")


def _alive(mark: str) -> int:
    """Processes of this machine with the mark among their arguments, once those of ended sandboxes have had time to go."""
    end = time.monotonic() + 5
    while True:
        found = 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                found += mark.encode() in Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)
