"""The agent's final file system in a fresh sandbox, without what would run before, or instead of, the judge's programs."""

from __future__ import annotations

import tarfile
from pathlib import Path

from evaluators.patch_rules import matcher, shadowing
from polar import changes as archive
from polar.errors import EvaluatorError
from polar.judge import Changes
from polar.sandbox import Sandbox

_BIN = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin")
# Read by loaders, shells, interpreters and test runners at their start, from places where no task has to write.
_STARTUP = [
    "etc/ld.so.preload", "etc/profile", "etc/profile.d", "etc/bash.bashrc", "etc/environment", "etc/zsh", "etc/gitconfig",
    "root/.bash*", "root/.profile", "root/.zsh*", "root/.gitconfig", "root/.config/git", "root/.pip", "root/.config/pip",
    "home/*/.bash*", "home/*/.profile", "home/*/.zsh*", "home/*/.gitconfig", "**/sitecustomize.py", "**/usercustomize.py",
    "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "**/ld-linux*", "**/libc.so*",
    "**/libc-*.so", "**/libpthread*.so*", "**/libdl*.so*",
]  # fmt: skip


def restore(sandbox: Sandbox, changes: Changes, own: list[str], workdir: str, timeout: float) -> list[str]:
    """Bring `changes` of a whole file system (`under` "/") in, but nothing at the judge's `own` folders. Returns what stays
    as the image has it although the agent changed it. Raises InfraError, EvaluatorError."""
    if changes.truncated:
        raise EvaluatorError("the agent's changes are more than is collected", code="state_too_large", retryable=False)
    commands = _commands(sandbox, timeout)
    startup = matcher(_STARTUP)
    assert startup is not None
    base = workdir.strip("/")
    kept = []
    names = [*archive.removed(changes.archive), *archive.paths(changes.archive)]
    pth = _running_pth(changes.archive)
    for path in dict.fromkeys(names):
        folder, _, name = path.rpartition("/")
        below = path[len(base) + 1 :] if base and path.startswith(base + "/") else None
        if (
            startup.match(path)
            or (folder in _BIN and name in commands)
            or path in pth
            or (below is not None and (module := shadowing(below)) and not _was(sandbox, f"/{base}/{module}", timeout))
        ):
            kept.append(path)
    exclude = (*(p.strip("/") for p in own), "proc", "sys", "dev", *kept)
    archive.apply(sandbox, changes.archive, "/", timeout=timeout, exclude=exclude)
    return kept


def _commands(sandbox: Sandbox, timeout: float) -> set[str]:
    """Names of the image's own programs."""
    folders = " ".join("/" + b for b in _BIN)
    r = sandbox.exec(f"ls -a {folders} 2>/dev/null", cwd="/", timeout=timeout, output_limit=4 << 20)
    return {
        line for line in r.output.decode("utf-8", "surrogateescape").splitlines() if line and not line.endswith(":")
    }


def _was(sandbox: Sandbox, path: str, timeout: float) -> bool:
    return sandbox.exec(["test", "-e", path], cwd="/", timeout=timeout).exit_code == 0


def _running_pth(path: Path) -> set[str]:
    """`.pth` files that run code: lines that begin with `import`."""
    out = set()
    with tarfile.open(path, "r:") as tar:
        for m in tar:
            if m.name.endswith(".pth") and m.name.startswith("files/"):
                source = tar.extractfile(m) if m.isreg() else None
                lines = source.read(1 << 20).splitlines() if source else [b"import"]
                if any(line.lstrip().startswith(b"import") for line in lines):
                    out.add(m.name[len("files/") :])
    return out
