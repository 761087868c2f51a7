"""The `apptainer` program: where it is, and as whom it runs.

A worker that is an ordinary user runs it as itself. A worker that is root gives its rights away first, to the user named
by POLAR_APPTAINER_USER: sandboxes of root's would be root on the host where a hole is found in one of the two kernels' walls.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from msgspec import Struct

from polar.errors import InfraError

USER_VARIABLE = "POLAR_APPTAINER_USER"
DEFAULT_USER = "polar-apptainer"
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
# What Apptainer may take from the worker's environment: registry accounts and a cluster's proxy settings.
_PASSED = (
    "APPTAINER_DOCKER_USERNAME", "APPTAINER_DOCKER_PASSWORD", "APPTAINER_NOHTTPS", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip


class Cli(Struct, frozen=True, kw_only=True):
    """`owner` is (uid, gid) of whom containers belong to; None: the worker's own. `python` can be run by them."""

    binary: str
    python: str
    version: str
    home: str
    owner: tuple[int, int] | None = None

    def as_owner(self, argv: list[str]) -> list[str]:
        if self.owner is None:
            return argv
        uid, gid = self.owner
        return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--init-groups", "--", *argv]

    def give(self, path: Path) -> None:
        if self.owner is not None:
            os.chown(path, *self.owner)

    def environment(self, config: Path, **more: str) -> dict[str, str]:
        passed = {k: os.environ[k] for k in _PASSED if k in os.environ}
        return {
            **passed,
            "PATH": PATH,
            "HOME": self.home,
            "LANG": "C.UTF-8",
            "APPTAINER_CONFIGDIR": str(config),
            **more,
        }

    def run(
        self,
        argv: list[str],
        *,
        env: dict[str, str],
        timeout: float,
        prefix: Sequence[str] = (),
        inner: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `apptainer` with these arguments, after the commands `prefix` as this process's user and `inner` as the
        owner. Its own end is waited for, not that of what it leaves running. Raises InfraError on a time-out, OSError."""
        command = [*prefix, *self.as_owner([*inner, self.binary, *argv])]
        # Files, not pipes: an instance keeps what it was started with.
        with open(os.memfd_create("out"), "w+b") as out, open(os.memfd_create("err"), "w+b") as err:
            process = subprocess.Popen(
                command, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
            try:
                code = process.wait(timeout=max(0.1, timeout))
            except BaseException as e:
                process.kill()
                process.wait()
                if isinstance(e, subprocess.TimeoutExpired):
                    raise InfraError(f"apptainer {argv[0]}: no end after {timeout:.0f} s", code="exec_failed") from e
                raise
            for f in (out, err):
                f.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())


def message(done: subprocess.CompletedProcess[bytes]) -> str:
    """What it complained about, in one line."""
    lines = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines()]
    fatal = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("FATAL", "ERROR")) and ":" in line]
    return " ".join(fatal or [line for line in lines if line][-2:])[-400:] or f"exit code {done.returncode}"


@cache
def find() -> Cli | str:
    """Apptainer as this process can use it, or why it can't. Once per process."""
    binary = shutil.which("apptainer", path=os.environ.get("PATH", PATH) + ":" + PATH)
    if binary is None:
        return "apptainer is not installed"
    owner, home = None, os.path.expanduser("~")
    if os.geteuid() == 0:
        name = os.environ.get(USER_VARIABLE, DEFAULT_USER)
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            return (
                f"the worker is root, and the user whose containers it would run doesn't exist: {USER_VARIABLE}={name}"
            )
        if entry.pw_uid == 0:
            return f"{USER_VARIABLE}: containers of root's own are not made"
        if shutil.which("setpriv") is None:
            return "the worker is root and 'setpriv' (util-linux) is not installed"
        owner, home = (entry.pw_uid, entry.pw_gid), entry.pw_dir
    cli = Cli(binary=binary, python=os.path.realpath(sys.executable), version="?", home=home, owner=owner)
    try:
        python = _python(cli)
        probe = subprocess.run(cli.as_owner([binary, "--version"]), capture_output=True, text=True, timeout=20)
        spaces = subprocess.run(cli.as_owner(["unshare", "-Urm", "true"]), capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{binary}: {e}"
    if probe.returncode != 0:
        return f"{binary}: {probe.stderr.strip()[-200:]}"
    if spaces.returncode != 0:
        return f"user namespaces are not allowed here: {spaces.stderr.strip()[-200:]}"
    if not python:
        return f"user {(owner or (os.getuid(),))[0]} can run no python3: neither '{cli.python}' nor the system's"
    return Cli(binary=binary, python=python, version=probe.stdout.split()[-1], home=home, owner=owner)


def _python(cli: Cli) -> str:
    """This process's interpreter, or the system's if the owner can't get to it (below somebody's home)."""
    for path in (cli.python, "/usr/bin/python3"):
        # Through a shell: `setpriv` itself starts programs with the rights it still has.
        argv = cli.as_owner(["/bin/sh", "-c", 'exec "$0" -I -S -c "import ctypes,resource,array"', path])
        if subprocess.run(argv, capture_output=True, timeout=20, cwd="/").returncode == 0:
            return path
    return ""


def need() -> Cli:
    found = find()
    if isinstance(found, str):
        raise InfraError(f"Apptainer can't be used: {found}", code="runtime_create_failed", retryable=False)
    return found


def left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise InfraError("no time left to create the sandbox", code="runtime_create_failed")
    return seconds
