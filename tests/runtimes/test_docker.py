"""What is special about `docker`: images, users, the relay, clean-up without sight of the processes."""

from __future__ import annotations

import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from polar.config import Settings
from polar.errors import InfraError, InvalidConfig, UnsupportedSpec
from polar.sandbox import ProxyEndpoint
from polar.task import Exec, RuntimeSpec, UploadFile
from runtimes import docker_bridge
from runtimes.docker import LABEL_REF, DockerRuntime, Options
from runtimes.prepare import run_prepare
from tests.runtimes import small_image
from tests.runtimes.conftest import IMAGE, REPOSITORY, docker_missing, ensure_image, running, unique
from tests.runtimes.engines import Tunnel
from tests.runtimes.test_conformance.common import RUNAWAYS, get

BARE = "polar-sandbox:test-bare"  # no python, no socat


# Of this run alone: another may be at work on the same engine.
OURS = {"polar.test": f"docker-{unique()}"}


@pytest.fixture
def runtime(tmp_path) -> Iterator[DockerRuntime]:
    if why := docker_missing():
        pytest.skip(why)
    ensure_image()
    made = DockerRuntime(Settings(data_dir=str(tmp_path / "data")))
    yield made
    for ref in made.list(OURS):
        made.attach(ref).destroy()


def create(runtime, proxy=None, **fields):
    spec = RuntimeSpec(**{"image": IMAGE, **fields})
    return runtime.create(spec, labels=OURS, proxy=proxy, timeout=60)


pytestmark = pytest.mark.docker


def test_missing_image(runtime):
    with pytest.raises(InfraError, match="polar-sandbox:no-such") as e:
        create(runtime, image="polar-sandbox:no-such")
    assert (e.value.code, e.value.retryable) == ("image_missing", False)
    with pytest.raises(InfraError) as e:  # a registry that doesn't answer may do so later
        create(runtime, image="127.0.0.1:1/no/such:image", options={"pull": True})
    assert (e.value.code, e.value.retryable) == ("runtime_create_failed", True)
    assert runtime.list(OURS) == []


def test_an_image_is_needed(runtime):
    with pytest.raises(UnsupportedSpec, match=r"runtime\.image"):
        runtime.check(RuntimeSpec())


def test_a_creation_that_fails_leaves_nothing(runtime, tmp_path):
    from polar.task import Volume

    with pytest.raises(InfraError) as e:
        create(runtime, volumes=[Volume(source=str(tmp_path / "missing"), target="/v")])
    assert e.value.code == "runtime_create_failed"
    with pytest.raises(InfraError) as e:
        create(runtime, options={"user": "nobody-of-that-name"})
    assert e.value.code == "runtime_create_failed"
    with pytest.raises(InfraError, match="no time left") as e:
        runtime.create(RuntimeSpec(image=IMAGE), labels=OURS, proxy=None, timeout=0)
    assert e.value.code == "runtime_create_failed" and e.value.retryable
    assert runtime.list(OURS) == []


def test_created_but_never_started_is_found(runtime):
    box = create(runtime)
    api = docker.from_env().api
    label = api.inspect_container(box.ref.handle)["Config"]["Labels"][LABEL_REF]
    half_made = {**OURS, LABEL_REF: label, "half": "1"}
    half = api.create_container(IMAGE, command=["sleep", "1"], labels=half_made)["Id"]
    foreign = api.create_container(IMAGE, command=["sleep", "1"], labels=OURS)["Id"]
    try:
        refs = runtime.list({**OURS, "half": "1"})
        assert [r.handle for r in refs] == [half]
        runtime.attach(refs[0]).stop()
        runtime.attach(refs[0]).destroy()
        assert runtime.list({**OURS, "half": "1"}) == []
        assert runtime.list(OURS) == [box.ref]  # others' containers are not ours
    finally:
        api.remove_container(foreign)


def test_the_engine_is_away(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    runtime = DockerRuntime(Settings(data_dir=str(tmp_path)))
    ok, text = runtime.available()
    assert not ok and "can't be reached" in text
    with pytest.raises(InfraError) as e:
        create(runtime)
    assert (e.value.code, e.value.retryable) == ("runtime_create_failed", True)
    with pytest.raises(InfraError):
        runtime.list({})


@pytest.mark.parametrize("user", ["agent", "1000:1000"])
def test_another_user(runtime, proxy, user, tmp_path):
    box = create(runtime, proxy.endpoint, options={"user": user}, workdir="/repo/x")
    home = "/home/agent"
    assert box.ref.state["home"] == home
    r = box.exec("id -u; echo $HOME; touch here && echo ok; kill -9 -1; echo no", timeout=30)
    assert r.output.split()[:3] == [b"1000", home.encode(), b"ok"]
    assert get(box) == "proxy saw /x"  # the container survived: its first process is another's
    box.write("deep/er/f", b"x")
    box.upload(REPOSITORY / "runtimes", "tree")
    assert box.exec("touch deep/y deep/er/y tree/y; rm deep/er/f", timeout=30).exit_code == 0


def test_a_suicide_is_the_agent_s_own(runtime, tmp_path):
    """Root in its container can end it. The command is told as killed, and the files are still there."""
    box = create(runtime)
    r = box.exec("echo last > words; kill -9 -1; sleep 60", timeout=30)
    assert r.exit_code == 137 and not r.timed_out
    assert not box.download("words", tmp_path / "words", limit=100)
    assert (tmp_path / "words").read_text() == "last\n"


def test_where_processes_can_t_be_seen_all_are_ended(runtime, monkeypatch, tmp_path):
    monkeypatch.setattr(docker_bridge, "may_enter", lambda: False)
    box, word = create(runtime), unique()
    assert box.exec("echo kept > f;" + RUNAWAYS.format(word), timeout=1).timed_out
    assert running(word) == 0
    assert box.exec("cat f", timeout=30).output == b"kept\n"


_OUT_OF_SIGHT = """
import sys
from polar.config import Settings
from polar.task import RuntimeSpec
from runtimes import procs
from runtimes.docker import DockerRuntime
scans, scan = [], procs.scan
procs.scan = lambda: scans.append(1) or scan()
label, word, folder, image = sys.argv[1:]
runtime = DockerRuntime(Settings(data_dir=folder))
box = runtime.create(RuntimeSpec(image=image), labels={"polar.test": label}, proxy=None, timeout=60)
print(box.exec("echo kept > f; exit 3", timeout=60).exit_code, len(scans))
print(box.exec("setsid sleep %s & sleep 600" % word, timeout=1).timed_out)
print(box.exec("cat f", timeout=60).output)
"""


def test_a_root_worker_in_a_pid_namespace_of_its_own(runtime, tmp_path):
    """As in compose: it is root, but the engine's pids mean nothing to it, and it wastes no time looking for them."""
    argv = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", _OUT_OF_SIGHT]
    if subprocess.run([*argv[:4], "true"], capture_output=True).returncode:
        pytest.skip("no pid namespaces for this user")
    word = unique()
    argv += [OURS["polar.test"], word, str(tmp_path), IMAGE]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines() == ["3 0", "True", "b'kept\\n'"], done.stderr
    assert running(word) == 0


def test_relay(runtime, proxy, monkeypatch):
    monkeypatch.setattr(docker_bridge, "may_enter", lambda: False)
    box = create(runtime, proxy.endpoint, options={"user": "agent"})
    assert box.ref.state["bridge"] == docker_bridge.RELAY
    assert get(box, "/a") == "proxy saw /a"
    proxy.stop_unix()
    proxy.start_unix()
    assert get(box, "/b") == "proxy saw /b"
    assert box.exec("sleep 60", timeout=0.3).timed_out  # which restarted the container
    assert get(box, "/c") == "proxy saw /c"
    r = box.exec(f"touch {docker_bridge.MOUNT}/x", timeout=30)
    assert r.exit_code != 0


def test_relay_needs_something_to_run(runtime, proxy, monkeypatch):
    argv = [sys.executable, "compose/base_image.py", "--if-missing", "--tag", BARE, "bash", "coreutils", "dash"]
    subprocess.run(argv, cwd=REPOSITORY, check=True)
    assert create(runtime, proxy.endpoint, image=BARE).ref.state["bridge"] == docker_bridge.NAMESPACE
    monkeypatch.setattr(runtime, "_enters", False)
    with pytest.raises(InfraError, match="neither python3 nor socat") as e:
        create(runtime, proxy.endpoint, image=BARE)
    assert (e.value.code, e.value.retryable) == ("runtime_create_failed", False)
    with pytest.raises(InfraError, match="proxy_socket") as e:
        create(runtime, ProxyEndpoint(url=proxy.endpoint.url))
    assert (e.value.code, e.value.retryable) == ("runtime_create_failed", False)


def test_a_container_that_is_not_of_this_machine_gets_the_relay(runtime, proxy, monkeypatch):
    """An engine behind a tunnel looks local, but its pids mean other processes here, or none."""
    monkeypatch.setattr("runtimes.netns.is_container", lambda pid, container: False)
    box = create(runtime, proxy.endpoint)
    assert box.ref.state["bridge"] == docker_bridge.RELAY and get(box) == "proxy saw /x"
    assert len(runtime.list(OURS)) == 1  # the first try was removed


def test_limits_reach_the_engine(runtime):
    box = create(runtime, memory_mb=300, cpus=1.5)
    host = docker.from_env().api.inspect_container(box.ref.handle)["HostConfig"]
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"], host["PidsLimit"]) == (
        300 << 20,
        300 << 20,
        1_500_000_000,
        512,
    )
    assert (
        host["NetworkMode"] == "none" and host["CapDrop"] == ["ALL"] and host["Init"] is True and not host["Privileged"]
    )


def test_many_at_once(runtime):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(12) as pool:
        boxes = list(pool.map(lambda _: create(runtime), range(12)))
        codes = list(pool.map(lambda b: b.exec("exit 7", timeout=60).exit_code, boxes))
        list(pool.map(lambda b: b.destroy(), boxes))
    assert codes == [7] * 12 and runtime.list(OURS) == []


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_calls_at_once_are_a_whole_number(monkeypatch, tmp_path, text):
    monkeypatch.setenv("POLAR_DOCKER_PARALLEL", text)
    with pytest.raises(InvalidConfig, match=f"POLAR_DOCKER_PARALLEL: '{text}'"):
        DockerRuntime(Settings(data_dir=str(tmp_path)))


def test_a_private_registry(runtime, monkeypatch, tmp_path):
    api = docker.from_env().api
    base = tmp_path / "base"
    for f in ("bin", "lib", "lib64"):
        (base / f).mkdir(parents=True)
    for f in (*small_image.PROGRAMS, "lib64/ld-linux-x86-64.so.2"):
        (base / f).write_text("it is never run")
    with small_image.Registry(small_image.build(base)) as registry:
        image = f"{registry.host}/private/small:1"
        options = {"image": image, "options": {"pull": "missing"}}

        def code(**fields) -> tuple[str, bool]:
            with pytest.raises(InfraError) as e:
                create(runtime, **{**options, **fields})
            return e.value.code, e.value.retryable

        assert code(options={}) == ("image_missing", False) and registry.seen == []
        assert code() == ("image_missing", False)  # no account
        monkeypatch.setenv("POLAR_REGISTRY_USERNAME", registry.account[0])
        monkeypatch.setenv("POLAR_REGISTRY_PASSWORD", registry.account[1])
        monkeypatch.setenv("POLAR_REGISTRY", "elsewhere.example")
        assert code() == ("image_missing", False) and registry.seen == []  # the account is for another host
        monkeypatch.setenv("POLAR_REGISTRY", registry.host)
        assert code(image=f"{registry.host}/private/none:1") == ("image_missing", False)
        try:
            runtime._image(RuntimeSpec(image=image), Options(pull="missing"), time.monotonic() + 60)
            asked = len(registry.seen)
            runtime._image(RuntimeSpec(image=image), Options(pull="missing"), time.monotonic() + 60)
            assert len(registry.seen) == asked
            runtime._image(RuntimeSpec(image=image), Options(pull="always"), time.monotonic() + 60)
            assert len(registry.seen) > asked
        finally:
            api.remove_image(image, force=True)
            registry.shutdown()


class _Tcp(socketserver.ThreadingTCPServer):
    daemon_threads = True


def test_an_engine_over_tcp(runtime, proxy, monkeypatch, tmp_path):
    with _Tcp(("127.0.0.1", 0), Tunnel) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_address[1]}")
        far = DockerRuntime(Settings(data_dir=str(tmp_path)))
        box = create(far, proxy.endpoint)
        assert box.ref.state["bridge"] == docker_bridge.RELAY and get(box) == "proxy saw /x"
        assert box.exec("cat; exit 4", stdin=b"through", timeout=30).exit_code == 4
        box.write("f", b"data")
        assert not box.download("f", tmp_path / "f", limit=100) and (tmp_path / "f").read_bytes() == b"data"
        assert box.exec("sleep 60", timeout=0.5).timed_out
        with pytest.raises(UnsupportedSpec, match=r"runtime\.disk_mb"):
            create(far, disk_mb=100)
        box.destroy()
        server.shutdown()


def test_an_engine_that_comes_back(runtime, proxy, monkeypatch, tmp_path):
    """It restarts while commands run: they fail, a new one runs, and what is left is found."""
    sock = str(tmp_path / "engine.sock")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    def start() -> Server:
        server = Server(sock, Tunnel)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    server = start()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{sock}")
    far = DockerRuntime(Settings(data_dir=str(tmp_path)))
    box = create(far)
    server.shutdown()
    server.server_close()
    Path(sock).unlink()
    with pytest.raises(InfraError) as e:
        box.exec("true", timeout=30)
    assert (e.value.code, e.value.retryable) == ("exec_failed", True)
    with pytest.raises(InfraError) as e:
        create(far)
    assert (e.value.code, e.value.retryable) == ("runtime_create_failed", True)
    server = start()
    assert box.exec("echo back", timeout=30).output == b"back\n"
    assert [r.handle for r in far.list(OURS)] == [box.ref.handle]
    server.shutdown()
    server.server_close()


def test_prepared_once(runtime, tmp_path):
    api, word = docker.from_env().api, unique()
    steps = [
        Exec(command=f"date +%N >stamp; echo {word} >what; echo $SECRET >secret"),
        UploadFile(target="up", content="x"),
    ]
    fields = {"prepare": steps, "options": {"cache_prepare": True}, "env": {"SECRET": "s3cret"}, "workdir": "/work"}

    def prepared(**more):
        box = create(runtime, **{**fields, **more})
        begun = box.ref.state.get("prepared")
        actions = more.get("prepare", steps)
        run_prepare(box, actions, timeout=60, fetch=Path)
        return begun, box.exec("cat stamp what up secret 2>/dev/null; id -u", timeout=30).output, box

    made = set()
    try:
        first, second = prepared(), prepared()
        tag = first[2].ref.state["tag"]
        made.add(tag)
        assert (first[0], second[0]) == (None, "1") and first[1] == second[1] and word.encode() in first[1]
        config = api.inspect_image(f"polar-prepared:{tag}")["Config"]
        assert "s3cret" not in str(config["Env"])
        assert second[2].exec("echo $SECRET", timeout=30).output == b"s3cret\n"
        other = prepared(prepare=[*steps, Exec(command="echo more >what")])
        made.add(other[2].ref.state["tag"])
        assert other[0] is None and b"more" in other[1]
        assert prepared(env={"SECRET": "s3cret", "A": "1"})[0] is None
        made |= {b.ref.state["tag"] for b in (runtime.attach(r) for r in runtime.list(OURS)) if "tag" in b.ref.state}
        # What judges is prepared by its own steps, or not at all.
        with pytest.raises(InfraError, match="other prepare steps"):
            run_prepare(create(runtime, **fields), [], timeout=60, fetch=Path)
    finally:
        for ref in runtime.list(OURS):
            runtime.attach(ref).destroy()
        for tag in made:
            api.remove_image(f"polar-prepared:{tag}", force=True)
