"""The deployment for real: images built, everything up, a task through the control plane, everything gone.

The engine stays outside (ENGINE_URL), as SGLang would: so no image needs torch.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polar.client import ResultsConsumer
from tests.compose.deployment import ROOT, SECRETS

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1500)]

BASE, SANDBOX = "polar-base:py3", "polar-sandbox:base"
ASK = (
    "import json,os,urllib.request as u;"
    "b=json.dumps({'model':'policy','messages':[{'role':'user','content':'hi'}]}).encode();"
    "h={'Content-Type':'application/json','Authorization':'Bearer '+os.environ['OPENAI_API_KEY']};"
    "print(u.urlopen(u.Request(os.environ['OPENAI_BASE_URL']+'/chat/completions',b,h)).status)"
)


def sh(*argv: str | Path, timeout: float = 120, **kw: Any) -> str:
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=timeout, **kw)
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def until(what: str, seconds: float, check: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.5)
    return found


class Deployment:
    def __init__(self, compose: list[str], folder: Path, project: str):
        self.project, self.env_file = project, folder / "env"
        self._argv = [*compose, "--env-file", str(self.env_file), "-p", project]
        self._argv += ["-f", str(ROOT / "compose/docker-compose.yml"), "-f", str(folder / "override.yml")]
        self.secret = {name: secrets.token_hex(12) for name in SECRETS}

    def compose(self, *words: str, timeout: float = 400) -> str:
        return sh(*self._argv, *words, timeout=timeout)

    def containers(self, *more: str) -> list[str]:
        label = f"label=com.docker.compose.project={self.project}"
        return sh("docker", "ps", "-a", "--filter", label, "--format", "{{.Names}} {{.Status}}", *more).splitlines()

    def address(self, service: str, port: int) -> str:
        return self.compose("port", service, str(port)).strip()

    def api(self, path: str, body: Any = None, token: str | None = None) -> Any:
        request = urllib.request.Request(
            f"http://{self.address('api', 8080)}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {token or self.secret['POLAR_API_TOKEN']}"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    def well(self, count: int) -> bool:
        return sum("(healthy)" in line for line in self.containers()) == count


@pytest.fixture(scope="module")
def compose() -> list[str]:
    for argv in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(argv[0]) and subprocess.run([*argv, "version"], capture_output=True).returncode == 0:
            break
    else:
        pytest.skip("neither 'docker compose' nor docker-compose is installed")
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker engine answers")
    return argv


@pytest.fixture(scope="module")
def images(compose: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    for tag, script in (
        (BASE, ["sh", "compose/base/make_base.sh"]),
        (SANDBOX, [sys.executable, "compose/base_image.py"]),
    ):
        if subprocess.run(["docker", "image", "inspect", tag], capture_output=True).returncode:
            made = subprocess.run([*script, "--tag", tag], cwd=ROOT, capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"image {tag} is missing and can't be made: {made.stderr.strip()[-200:]}")
    # A copy of what images are made of, so that this machine's certificates can lie in it.
    context = tmp_path_factory.mktemp("context")
    rooms = [x[1:] for x in (ROOT / "compose/Dockerfile.dockerignore").read_text().splitlines() if x.startswith("!")]
    for name in (r for r in rooms if (ROOT / r).exists()):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        skip = shutil.ignore_patterns("__pycache__", "extra")
        shutil.copytree(ROOT / name, context / name, ignore=skip) if (ROOT / name).is_dir() else shutil.copy(
            ROOT / name, context / name
        )
    for name in ("Dockerfile", "Dockerfile.dockerignore"):
        shutil.copy(ROOT / "compose" / name, context / "compose" / name)
    (context / "compose/base/extra").mkdir()
    bundle = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    if bundle and Path(bundle).is_file():
        shutil.copy(bundle, context / "compose/base/extra/ca.crt")
    docker = _with_buildkit()
    tags = {target: f"polar-test:{target}-{os.getpid()}" for target in ("core", "store")}
    try:
        for target, tag in tags.items():
            words = ["build", "-q", "-f", "compose/Dockerfile", "--target", target, "--build-arg", f"BASE_IMAGE={BASE}"]
            sh(docker, *words, "-t", tag, ".", cwd=context, timeout=900, env=os.environ | {"DOCKER_BUILDKIT": "1"})
        yield tags
    finally:
        subprocess.run(["docker", "rmi", *tags.values()], capture_output=True)


def _with_buildkit() -> str:
    """A Docker client that can build: newer ones need a plug-in for it, Debian's has it inside."""
    for docker in filter(None, (shutil.which("docker"), "/usr/bin/docker")):
        version = subprocess.run([docker, "--version"], capture_output=True, text=True).stdout
        major = int("".join(c for c in version.partition("version ")[2].partition(".")[0] if c.isdigit()) or 0)
        if major < 23 or subprocess.run([docker, "buildx", "version"], capture_output=True).returncode == 0:
            return docker
    pytest.skip("the Docker client can't build with BuildKit (its buildx plug-in is missing)")


@pytest.fixture(scope="module")
def engine() -> Iterator[dict[str, str]]:
    """An engine on this host that containers reach, and a folder with its tokenizer."""
    config = json.loads(sh("docker", "network", "inspect", "bridge"))[0]["IPAM"]["Config"][0]
    # Some engines don't tell the gateway; it is the network's first address then.
    host = config.get("Gateway") or str(next(ipaddress.ip_network(config["Subnet"]).hosts()))
    with socket.socket() as s:
        try:
            s.bind((host, 0))
        except OSError as e:
            pytest.skip(f"the Docker engine's bridge has no address on this machine ({host}: {e.strerror})")
    key = secrets.token_hex(12)
    with tempfile.TemporaryDirectory(prefix="polar-engine-") as folder:
        file, log = Path(folder) / "url", Path(folder) / "log"
        argv = ["--model", "tiny-random", "--data-dir", folder, "--host", host, "--port-file", str(file)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "engine", *argv],
                cwd=ROOT, env=os.environ | {"POLAR_ENGINE_API_KEY": key}, stdout=out, stderr=out,
            )  # fmt: skip
        try:
            until("the engine", 180, lambda: file.exists() or process.poll() is not None)
            assert file.exists(), log.read_text()[-2000:]
            tokenizer = next(p for p in Path(folder).glob("tiny-random*") if p.is_dir())
            yield {"url": file.read_text().strip(), "key": key, "tokenizer": str(tokenizer)}
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="module")
def deployment(
    compose: list[str], images: dict[str, str], engine: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("compose")
    d = Deployment(compose, folder, f"polar-test-{secrets.token_hex(3)}")
    d.secret["POLAR_ENGINE_API_KEY"] = engine["key"]
    run_dir = tempfile.mkdtemp(prefix="polar-run-")
    os.chmod(run_dir, 0o755)
    values = d.secret | {
        "POLAR_NAMESPACE": d.project, "POLAR_NODE": d.project, "POLAR_RUN_DIR": run_dir,
        "API_PORT": "", "PROXY_PORT": "", "REDIS_PORT": "", "S3_PORT": "",
        "ENGINE_URL": engine["url"], "ENGINE_TARGET": "core", "MODEL_TOKENIZER": "/tokenizer",
        "MODEL_CONTEXT_LENGTH": "256", "MODEL_MAX_NEW_TOKENS": "8", "POLAR_IMAGE": images["core"],
        "POLAR_ENGINE_IMAGE": images["core"], "POLAR_STORE_IMAGE": images["store"],
    }  # fmt: skip
    d.env_file.write_text("".join(f"{k}={v}\n" for k, v in values.items()))
    override = {"services": {"proxy": {"volumes": [f"{engine['tokenizer']}:/tokenizer:ro"]}}}
    (folder / "override.yml").write_text(yaml.safe_dump(override))
    try:
        try:
            d.compose("up", "-d", "--no-build")
        except AssertionError as e:
            raise AssertionError(f"{e}\n{d.compose('logs', '--no-color', '--tail', '15')}") from None
        yield d
    finally:
        subprocess.run([*d._argv, "down", "-v", "--remove-orphans"], capture_output=True, timeout=300)
        shutil.rmtree(run_dir, ignore_errors=True)


def task(samples: int) -> dict[str, Any]:
    return {
        "instruction": "none",
        "num_samples": samples,
        "timeout_seconds": 240,
        "runtime": {"backend": "docker", "image": SANDBOX, "memory_mb": 256},
        "agent": {"harness": "shell", "command": f'python3 -c "{ASK}"'},
        "evaluator": {"name": "session_completed"},
    }


def run(d: Deployment, samples: int) -> list[str]:
    """The sessions of a task that has ended well."""
    sessions: dict[str, list[str]] = d.api("/v1/tasks", task(samples))["tasks"]
    name = next(iter(sessions))

    def done() -> Any:
        state = d.api(f"/v1/tasks/{name}")
        return state if state["done"] == samples else None

    state = until("the task", 240, done)
    assert state["terminations"] == {"finished": samples}, state
    return sessions[name]


def test_up_work_scale_restart_down(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    d = deployment
    until("health of 9 containers", 240, lambda: d.well(9))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        d.api("/v1/status", token="not-the-token")
    local = task(1) | {"runtime": {"backend": "local"}}
    with pytest.raises(urllib.error.HTTPError, match="400"):
        d.api("/v1/tasks", local)  # it would run beside the Docker socket

    sessions = run(d, 2)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", d.secret["S3_ACCESS_KEY"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", d.secret["S3_SECRET_KEY"])
    trainer = ResultsConsumer(
        f"redis://:{d.secret['REDIS_PASSWORD']}@{d.address('redis', 6379)}/0",
        f"s3://polar?endpoint=http://{d.address('s3', 8333)}",
        namespace=d.project,
        block_seconds=30,
    )
    for delivery in itertools.islice(trainer, 2):
        sessions.remove(delivery.result.session_id)
        assert delivery.result.trajectory.fidelity.sampled_tokens > 0
        delivery.ack()
    assert sessions == []

    d.compose("up", "-d", "--no-build", "--no-recreate", "--scale", "run=2", "--scale", "postrun=2")
    until("health of 11 containers", 240, lambda: d.well(11))
    # A store that is killed comes back with everything, and the processes around it go on.
    container = d.compose("ps", "-q", "redis").strip()
    pid = int(sh("docker", "inspect", container, "--format", "{{.State.Pid}}"))
    os.kill(pid, 9)
    until("redis", 60, lambda: int(sh("docker", "inspect", container, "--format", "{{.RestartCount}}")) == 1)
    until("health after the restart", 120, lambda: d.well(11))
    run(d, 4)

    d.compose("down", "-v", "--remove-orphans")
    label = f"label=com.docker.compose.project={d.project}"
    assert d.containers() == []
    for kind in ("network", "volume"):
        assert sh("docker", kind, "ls", "-q", "--filter", label).split() == []
    assert sh("docker", "ps", "-aq", "--filter", f"label=polar.namespace={d.project}").split() == []
