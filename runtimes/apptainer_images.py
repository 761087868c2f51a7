"""Images of the `apptainer` runtime: each is unpacked once per node, and many sandboxes lie over the same folder.

A folder needs no FUSE daemon per sandbox, and the kernel's own overlay works over it without root. The cache is keyed by
content, filled under a lock and by one rename, and bounded: what was used longest ago and lies under no sandbox goes.
All that a build writes lies in one folder, named after its lock: whoever finds the lock free removes what a killed worker left.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct, field

from polar.codec import from_json, to_json
from polar.errors import InfraError, NotFound
from runtimes import procs, tree
from runtimes.apptainer_cli import Cli, left, message
from runtimes.apptainer_source import Source, configuration, digest

log = logging.getLogger("polar.apptainer")

LIMIT_VARIABLE = "POLAR_APPTAINER_CACHE_GB"
DEFAULT_LIMIT_GB = 50.0
LAYERS_SECONDS = 86400.0  # how long an unfinished pull's layers are kept
_MISSING = (
    "not found",
    "manifest unknown",
    "unauthorized",
    "denied",
    "no such file",
    "does not exist",
    "unknown image",
)
# Apptainer's own, not the image's.
_NOISE = {"USER_PATH", "PS1", "PROMPT_COMMAND", "HOME", "PWD", "OLDPWD", "SHLVL", "_", "LD_LIBRARY_PATH"}
_NOISE_PREFIXES = ("APPTAINER", "SINGULARITY", "SING_USER")


class Image(Struct, kw_only=True):
    rootfs: str
    key: str = ""  # of the cache; empty for a folder used where it lies
    source: str = ""
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    bytes: int = 0


class Images:
    def __init__(self, root: Path, in_use: Callable[[], set[str]]):
        """`root` is the cache; `in_use` tells the keys of images under living sandboxes."""
        self._root = root
        self._in_use = in_use
        self._tidied = False
        self._envs: dict[tuple[str, int, int], dict[str, str]] = {}  # of folders used where they lie

    def get(self, cli: Cli, source: Source, pull: str, deadline: float) -> Image:
        """Raises InfraError: `image_missing` if it isn't there and may not be or can't be fetched, `runtime_create_failed`."""
        if source.kind == "folder":
            return Image(rootfs=source.where, source=source.where, env=self._env(cli, source.where, deadline))
        key = digest(source)
        if key is None:
            reference = self._root / "refs" / hashlib.sha256(source.where.encode()).hexdigest()
            with self._locked(reference.name, deadline):
                known = reference.read_text() if reference.exists() else ""
                if known and pull != "always" and (found := self._known(known)):
                    return found
                self._may_fetch(source, pull)
                made = self._unpack(cli, source, secrets.token_hex(32), reference.name, deadline)
                reference.parent.mkdir(exist_ok=True)
                temp = reference.with_suffix(".new")
                temp.write_text(made.key)
                os.replace(temp, reference)
        else:
            with self._locked(key, deadline):
                if found := self._known(key):
                    return found
                self._may_fetch(source, pull)
                made = self._unpack(cli, source, key, key, deadline)
        self.shrink()
        return made

    def _may_fetch(self, source: Source, pull: str) -> None:
        if source.kind == "remote" and pull == "never":
            raise InfraError(
                f"image '{source.where}' is not on this node (options.pull would fetch it)",
                code="image_missing",
                retryable=False,
            )

    def _known(self, key: str) -> Image | None:
        path = self._root / "images" / key / "image.json"
        try:
            image = from_json(path.read_bytes(), Image, str(path))
            os.utime(path)
            return image
        except (FileNotFoundError, NotFound):
            return None

    def _unpack(self, cli: Cli, source: Source, key: str, lock: str, deadline: float) -> Image:
        images = self._root / "images"
        for stale in images.glob(f".new-{lock}*"):  # of a worker killed meanwhile: only the lock's holder makes these
            _discard(stale)
        new = images / f".new-{lock}-{secrets.token_hex(8)}"
        # What a pull that ran out of time has fetched is there for the next one.
        layers = images / f".layers-{lock}" if source.kind == "remote" else new / "layers"
        for path in (new, new / "tmp", layers):
            path.mkdir(exist_ok=path == layers)
            cli.give(path)
        rootfs = images / key / "rootfs"
        try:
            env = cli.environment(
                self._root / "config", APPTAINER_CACHEDIR=str(layers), APPTAINER_TMPDIR=str(new / "tmp")
            )
            argv = ["-s", "build", "--sandbox", str(new / "rootfs"), source.uri]
            done = cli.run(argv, env=env, timeout=left(deadline))
            if done.returncode != 0:
                raise _failure(source, message(done))
            tree.remove(new / "tmp")
            tree.remove(layers)
            config = configuration(source)
            image = Image(
                rootfs=str(rootfs),
                key=key,
                source=source.uri,
                env=self._env(cli, str(new / "rootfs"), deadline),
                workdir=config.get("WorkingDir") or "",
                bytes=_size(new),
            )
            (new / "image.json").write_bytes(to_json(image))
            os.replace(new, images / key)
            return image
        except OSError as e:
            raise InfraError(f"image '{source.where}' can't be unpacked: {e}", code="runtime_create_failed") from e
        finally:
            if new.exists():
                _discard(new)

    def _env(self, cli: Cli, rootfs: str, deadline: float) -> dict[str, str]:
        """The image's environment, as its own scripts set it."""
        with contextlib.suppress(OSError):
            scripts = os.stat(os.path.join(rootfs, ".singularity.d", "env"))
            known = (rootfs, scripts.st_ino, scripts.st_mtime_ns)
            if known not in self._envs:
                self._envs[known] = self._told(cli, rootfs, deadline)
            return dict(self._envs[known])
        return self._told(cli, rootfs, deadline)

    def _told(self, cli: Cli, rootfs: str, deadline: float) -> dict[str, str]:
        argv = ["-s", "exec", "--userns", "--containall", "--no-home", "--cleanenv", rootfs, "env", "-0"]
        done = cli.run(argv, env=cli.environment(self._root / "config"), timeout=min(60.0, left(deadline)))
        pairs = (e.partition("=") for e in done.stdout.decode("utf-8", "replace").split("\0") if e)
        return {k: v for k, _, v in pairs if k not in _NOISE and not k.startswith(_NOISE_PREFIXES)}

    @contextlib.contextmanager
    def _locked(self, name: str, deadline: float) -> Iterator[None]:
        """Between threads and processes; a dead holder's lock is gone with it."""
        folder = self._root / "locks"
        with open(folder / name, "w") as f:
            while True:
                try:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    left(deadline)
                    time.sleep(0.05)
            yield

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """While it lasts nothing is removed: for a sandbox that begins to use an image."""
        with open(self._root / "locks" / "shrink", "w") as f:
            fcntl.flock(f, fcntl.LOCK_SH)
            yield

    def shrink(self) -> None:
        """Bring the cache below its limit, and remove what killed workers left. What can't be removed is left to the next."""
        limit = float(os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT_GB) * (1 << 30)
        images, locks = self._root / "images", self._root / "locks"
        with open(locks / "shrink", "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            for gone in images.glob(".old-*"):
                _discard(gone)
            for part in (*images.glob(".new-*"), *filter(_old, images.glob(".layers-*"))):
                with contextlib.suppress(BlockingIOError), open(locks / part.name.split("-")[1], "w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _discard(part)
            for former in ("blobs", "tmp"):  # of earlier versions
                if (self._root / former).exists():
                    _discard(self._root / former)
            found = []
            for path in images.glob("[!.]*/image.json"):
                found.append((path.stat().st_mtime, from_json(path.read_bytes(), Image, str(path))))
            total, used = sum(i.bytes for _, i in found), self._in_use()
            newest = max((t for t, _ in found), default=0.0)
            for used_at, image in sorted(found, key=lambda e: e[0]):
                if total <= limit:
                    return
                if image.key not in used and used_at != newest:
                    gone = images / f".old-{image.key}-{secrets.token_hex(8)}"
                    os.replace(images / image.key, gone)
                    _discard(gone)
                    total -= image.bytes

    def prepare(self, cli: Cli) -> None:
        for name in ("images", "config"):
            (self._root / name).mkdir(exist_ok=True)
            cli.give(self._root / name)
        (self._root / "locks").mkdir(exist_ok=True)
        if not self._tidied:
            self._tidied = True
            self.shrink()


def _old(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - folder.stat().st_mtime > LAYERS_SECONDS
    return False


def _discard(folder: Path) -> None:
    """Remove it, whatever still writes there: a build goes on when its worker is killed."""
    name = str(folder).encode()

    def builders(all: dict[int, procs.Proc]) -> set[int]:
        return {p for p in all if procs.argv_contains(p, name) or procs.environ_contains(p, name)}

    try:
        if folder.name.startswith(".new-"):
            procs.kill_all(builders)
        tree.remove(folder)
    except OSError as e:
        log.warning("%s is left for later: %s", folder, e)


def _failure(source: Source, text: str) -> InfraError:
    missing = any(word in text.lower() for word in _MISSING)
    code = "image_missing" if missing else "runtime_create_failed"
    return InfraError(f"image '{source.where}': {text}", code=code, retryable=not missing)


def _size(folder: Path) -> int:
    return sum(os.lstat(os.path.join(at, name)).st_blocks * 512 for at, _, names in os.walk(folder) for name in names)
