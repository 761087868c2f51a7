"""The same steps as a runtime's, by the bare command line or SDK: what there is to compare with."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from runtimes import apptainer_cli, bwrap

DATA = b"x" * 10_000


class Bare(Protocol):
    """One sandbox: `create` first, `destroy` last."""

    def create(self) -> None: ...
    def exec(self) -> None: ...
    def upload(self) -> None: ...
    def download(self) -> None: ...
    def stop(self) -> None: ...
    def destroy(self) -> None: ...


class Folder:
    """Bare processes, or bare bubblewrap: a folder is all that there is between commands."""

    def __init__(self, argv: list[str] | None = None):
        self._argv = argv

    def create(self) -> None:
        self._folder = Path(tempfile.mkdtemp())

    def exec(self) -> None:
        argv = ["/bin/true"]
        if self._argv is not None:
            argv = [*self._argv, "--bind", str(self._folder), "/work", "--chdir", "/work", "--", *argv]
        subprocess.run(argv, cwd=self._folder, check=True)

    def upload(self) -> None:
        (self._folder / "f").write_bytes(DATA)

    def download(self) -> None:
        (self._folder / "f").read_bytes()

    def stop(self) -> None:
        pass

    def destroy(self) -> None:
        shutil.rmtree(self._folder)


def bubblewrap() -> Folder:
    found = bwrap.find()
    assert isinstance(found, bwrap.Bwrap), found
    argv = [found.binary, *found.flags, "--unshare-net", "--die-with-parent", *bwrap.system_binds(), *bwrap.proc()]
    return Folder([*argv, "--dev", "/dev"])


class Docker:
    def __init__(self, api: Any, image: str):
        self._api, self._image = api, image

    def create(self) -> None:
        host = self._api.create_host_config(
            init=True, network_mode="none", cap_drop=["ALL"], pids_limit=512, mem_limit=4 << 30
        )
        made = self._api.create_container(
            self._image, ["infinity"], entrypoint=["sleep"], host_config=host, working_dir="/work"
        )
        self._id = made["Id"]
        self._api.start(self._id)

    def exec(self) -> None:
        made = self._api.exec_create(self._id, ["true"])
        self._api.exec_start(made["Id"])
        self._api.exec_inspect(made["Id"])

    def upload(self) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            info = tarfile.TarInfo("work/f")
            info.size = len(DATA)
            tar.addfile(info, io.BytesIO(DATA))
        self._api.put_archive(self._id, "/", buffer.getvalue())

    def download(self) -> None:
        chunks, _ = self._api.get_archive(self._id, "/work/f")
        b"".join(chunks)

    def stop(self) -> None:
        self._api.kill(self._id)

    def destroy(self) -> None:
        self._api.remove_container(self._id, force=True)


class Apptainer:
    """`apptainer instance` and `apptainer exec`; files go through pipes."""

    def __init__(self, cli: apptainer_cli.Cli, image: str, base: Path):
        self._cli, self._image, self._base = cli, image, base

    def _run(self, *argv: str, stdin: bytes | None = None) -> None:
        env = self._cli.environment(self._folder / "config")
        command = self._cli.as_owner([self._cli.binary, "-s", *argv])
        with tempfile.TemporaryFile() as f:
            f.write(stdin or b"")
            f.seek(0)
            subprocess.run(command, env=env, check=True, stdin=f, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def create(self) -> None:
        self._name = f"bare{uuid.uuid4().hex}"
        self._folder = self._base / self._name
        for path in (self._folder, self._folder / "overlay", self._folder / "config"):
            path.mkdir()
            self._cli.give(path)
        options = [
            "--userns",
            "--containall",
            "--no-home",
            "--net",
            "--network",
            "none",
            "--no-mount",
            "hostfs,tmp,home,cwd",
        ]
        pid = str(self._folder / "pid")
        overlay = str(self._folder / "overlay")
        self._run("instance", "start", *options, "--overlay", overlay, "--pid-file", pid, self._image, self._name)

    def exec(self) -> None:
        self._run("exec", f"instance://{self._name}", "true")

    def upload(self) -> None:
        self._run("exec", f"instance://{self._name}", "sh", "-c", "cat >/work/f", stdin=DATA)

    def download(self) -> None:
        self._run("exec", f"instance://{self._name}", "cat", "/work/f")

    def stop(self) -> None:
        self._run("instance", "stop", self._name)

    def destroy(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((self._folder / "pid").read_text()), signal.SIGKILL)
        shutil.rmtree(self._folder)


@contextlib.contextmanager
def docker_api() -> Iterator[Any]:
    import docker

    api = docker.APIClient(version="auto", num_pools=4, timeout=120, **docker.utils.kwargs_from_env())
    try:
        yield api
    finally:
        api.close()
