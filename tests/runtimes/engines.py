"""Docker engines of the tests' own, and ways to reach the machine's: each a context that gives what the environment needs.

They lie in a short folder of their own (sockets have short paths) and take their processes, mounts and files with them.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import docker
import pytest

from tests.runtimes.conftest import IMAGE, ensure_image, until

SOCKET = "/var/run/docker.sock"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"


def need(*programs: str) -> list[str]:
    """Their paths; skips the test if one is missing."""
    found = {p: shutil.which(p, path=f"{os.environ.get('PATH', '')}:{PATH}") for p in programs}
    if lacking := [p for p, path in found.items() if not path]:
        pytest.skip(f"not installed: {', '.join(lacking)}")
    return [path for path in found.values() if path]


def need_root() -> None:
    if os.geteuid():
        pytest.skip("needs root: it starts a daemon, or gives a user a folder")


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="polar-e-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for process in Path("/proc").glob(
            "[0-9]*"
        ):  # helpers of engines outlive them: containerd's shims, Podman's conmon
            with contextlib.suppress(OSError):
                if f"{folder}/".encode() in (process / "cmdline").read_bytes() and int(process.name) != os.getpid():
                    os.kill(int(process.name), signal.SIGKILL)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if line.split()[1].startswith(f"{folder}/"):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running(argv: list[str], log: Path, **more: Any) -> Iterator[subprocess.Popen]:
    with open(log, "ab") as out:
        program = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, **more
        )
    try:
        yield program
    finally:
        program.terminate()
        try:
            program.wait(30)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()


def answers(url: str, program: subprocess.Popen, log: Path, *, again: bool = False) -> Any:
    """A client for the engine there, as soon as it answers. Skips the test if it ends instead, unless it ran before."""

    def there() -> bool:
        if program.poll() is not None:
            said = log.read_text()[-500:]
            assert not again, said
            pytest.skip(f"it doesn't run on this machine: {said}")
        try:
            return bool(client.ping())
        except (docker.errors.DockerException, OSError):
            return False

    client = docker.APIClient(url, version="1.41", timeout=120)
    until(there, 60)
    return client


def give_image(api: Any) -> None:
    """The base image of this machine's engine. Some engines make folders that an archive leaves out for their owner only."""
    ensure_image()
    for _ in api.load_image(docker.from_env().api.get_image(IMAGE)):
        pass
    repair = ["find", "/", "-xdev", "-type", "d", "-perm", "0600", "-exec", "chmod", "755", "{}", "+"]
    made = api.create_container(IMAGE, repair, host_config=api.create_host_config(network_mode="none"))["Id"]
    api.start(made)
    assert api.wait(made)["StatusCode"] == 0
    name, _, tag = IMAGE.partition(":")
    api.commit(made, repository=name, tag=tag)
    api.remove_container(made)


# -- ways to the machine's engine


class Tunnel(socketserver.BaseRequestHandler):
    """Carries a connection to the machine's engine."""

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect(SOCKET)
            back = threading.Thread(target=self._pump, args=(engine, self.request))
            back.start()
            self._pump(self.request, engine)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@contextlib.contextmanager
def over_ssh() -> Iterator[dict[str, str]]:
    """An SSH server of its own, a configuration that names its host `engine`, and an `ssh` that reads this one."""
    sshd, ssh, keygen, _ = need("sshd", "ssh", "ssh-keygen", "docker")
    if not os.geteuid():
        os.makedirs(
            "/run/sshd", mode=0o755, exist_ok=True
        )  # the server wants it, and its package's start script makes it
    with short_folder() as at, socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
        reserved.close()
        for key in ("host", "user"):
            subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(at / key)], check=True)
        host_key = " ".join((at / "host.pub").read_text().split()[:2])
        (at / "known").write_text(f"[127.0.0.1]:{port} {host_key}\n")
        (at / "server").write_text(
            f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {at}/host\nAuthorizedKeysFile {at}/user.pub\nPidFile none\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nMaxStartups 100\n"
        )
        (at / "config").write_text(
            f"Host engine\n HostName 127.0.0.1\n User {getpass.getuser()}\n IdentityFile {at}/user\n IdentitiesOnly yes\n"
            f" UserKnownHostsFile {at}/known\n StrictHostKeyChecking yes\n"
        )
        (at / "ssh").write_text(f'#!/bin/sh\nexec {ssh} -F {at}/config "$@"\n')
        (at / "ssh").chmod(0o755)
        with running([sshd, "-D", "-e", "-f", str(at / "server")], at / "log") as program:
            until(lambda: program.poll() is not None or b"listening" in (at / "log").read_bytes())
            assert program.poll() is None, (at / "log").read_text()
            yield {"DOCKER_HOST": f"ssh://engine:{port}", "PATH": f"{at}:{os.environ['PATH']}"}


def certificates(at: Path) -> ssl.SSLContext:
    """An authority, a client's pair as Docker names its files, and the server's side."""
    (openssl,) = need("openssl")
    new = [openssl, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    run = lambda *argv: subprocess.run(argv, cwd=at, check=True, capture_output=True)  # noqa: E731
    run(*new, "-x509", "-days", "2", "-subj", "/CN=authority", "-keyout", "ca-key.pem", "-out", "ca.pem")
    (at / "extra").write_text("subjectAltName=IP:127.0.0.1\n")
    for key, cert in (("server-key.pem", "server.pem"), ("key.pem", "cert.pem")):
        run(*new, "-subj", f"/CN={cert}", "-keyout", key, "-out", "request")
        signing = [openssl, "x509", "-req", "-days", "2", "-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial"]
        run(*signing, "-extfile", "extra", "-in", "request", "-out", cert)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(at / "ca.pem"))
    context.load_cert_chain(at / "server.pem", at / "server-key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


# -- engines


class Daemon:
    """A dockerd in a network of its own: beside another in the same one, the first would lose its bridge."""

    def __init__(self, at: Path):
        self._unshare, self._dockerd = need("unshare", "dockerd")
        self.url, self._at = f"unix://{at}/s", at
        self.start(again=False)

    def start(self, *, again: bool = True) -> None:
        at = self._at
        argv = [self._unshare, "-n", self._dockerd, "--data-root", f"{at}/data", "--exec-root", f"{at}/exec"]
        argv += ["--pidfile", f"{at}/pid", "--config-file", f"{at}/no.json", "-H", self.url, "--bridge", "none"]
        self._ends = contextlib.ExitStack()
        (at / "no.json").write_text("{}")
        # A killed dockerd takes its containerd with it. Where nobody reaps that one, the next dockerd would take it for alive.
        (at / "exec/containerd/containerd.pid").unlink(missing_ok=True)
        self._program = self._ends.enter_context(running([*argv, "--iptables=false"], at / "log"))
        self.api = answers(self.url, self._program, at / "log", again=again)

    def end(self, number: signal.Signals) -> None:
        self._program.send_signal(number)
        self._ends.close()

    def remove(self) -> None:
        with contextlib.suppress(docker.errors.DockerException, OSError):
            for found in self.api.containers(all=True):
                self.api.remove_container(found["Id"], force=True)
        self.end(signal.SIGTERM)


@contextlib.contextmanager
def daemon() -> Iterator[Daemon]:
    need_root()
    with short_folder() as at:
        made = Daemon(at)
        try:
            yield made
        finally:
            made.remove()


def user_with_range() -> pwd.struct_passwd:
    """A user who may map others' ids: the one that rootless Apptainer has too."""
    name = os.environ.get("POLAR_APPTAINER_USER") or "polar-apptainer"
    try:
        if f"{name}:" in Path("/etc/subuid").read_text():
            return pwd.getpwnam(name)
    except (KeyError, OSError):
        pass
    pytest.skip(f"no user '{name}' with a range in /etc/subuid")


def as_user(user: pwd.struct_passwd, at: Path) -> dict[str, Any]:
    """For a process of theirs that has this folder for everything."""
    for folder in (at, at / "home", at / "run"):
        folder.mkdir(exist_ok=True, mode=0o755)
        os.chown(folder, user.pw_uid, user.pw_gid)
    env = {"PATH": PATH, "HOME": f"{at}/home", "XDG_RUNTIME_DIR": f"{at}/run", "USER": user.pw_name}
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": [], "env": env, "cwd": at}


@contextlib.contextmanager
def rootless_docker() -> Iterator[dict[str, str]]:
    """Without a network to outside: slirp4netns needs a device that not every machine gives to users."""
    need_root()
    rootlesskit, dockerd, *_ = need("rootlesskit", "dockerd", "newuidmap", "unshare")
    user = user_with_range()
    with short_folder() as at:
        url = f"unix://{at}/s"
        inner = f"rm -f /run/docker /run/containerd /run/xtables.lock; exec {dockerd} --data-root {at}/home/data"
        inner += f" --exec-root {at}/run/exec --pidfile {at}/run/pid -H {url}"
        argv = [rootlesskit, "--net=host", "--copy-up=/etc", "--copy-up=/run", "unshare", "-n", "sh", "-c", inner]
        with running(argv, at / "log", **as_user(user, at)) as program:
            give_image(answers(url, program, at / "log"))
            yield {"DOCKER_HOST": url}


# Root who may not raise limits (no CAP_SYS_RESOURCE, as in a container) can't start what Podman asks for.
_LIMITED_RUNC = """\
    #!/usr/bin/env -S python3 -IS
    import json, os, resource, sys

    for word, inside in (("--bundle", "/config.json"), ("--process", "")):
        if word in sys.argv:
            path = sys.argv[sys.argv.index(word) + 1] + inside
            with open(path) as f:
                config = json.load(f)
            for limit in config.get("process", config).get("rlimits", []):
                most = resource.getrlimit(getattr(resource, limit["type"]))[1]
                if most != resource.RLIM_INFINITY:
                    limit.update(hard=min(limit["hard"], most), soft=min(limit["soft"], most))
            with open(path, "w") as f:
                json.dump(config, f)
    os.execv("{runc}", sys.argv)
    """


@contextlib.contextmanager
def podman(*, rootless: bool) -> Iterator[dict[str, str]]:
    need_root()
    program_path, runc, *_ = need("podman", "runc", "conmon", "catatonit")
    user = user_with_range() if rootless else pwd.getpwuid(0)
    with short_folder() as at:
        more, url = as_user(user, at), f"unix://{at}/s"
        (at / "runc").write_text(dedent(_LIMITED_RUNC).replace("{runc}", runc))
        (at / "runc").chmod(0o755)
        (at / "containers.conf").write_text(
            '[engine]\ncgroup_manager="cgroupfs"\nruntime="limited"\nevents_logger="file"\nexit_command_delay=10\n'
            f'[engine.runtimes]\nlimited=["{at}/runc"]\n'
        )
        (at / "storage.conf").write_text(
            f'[storage]\ndriver="overlay"\ngraphroot="{at}/home/root"\nrunroot="{at}/run/root"\n'
        )
        more["env"] |= {"CONTAINERS_CONF": f"{at}/containers.conf", "CONTAINERS_STORAGE_CONF": f"{at}/storage.conf"}
        with running([program_path, "system", "service", "-t", "0", url], at / "log", **more) as program:
            api = answers(url, program, at / "log")
            give_image(api)
            yield {"DOCKER_HOST": url}
            for found in api.containers(all=True):
                api.remove_container(found["Id"], force=True)
