"""The agent's final file system in a fresh sandbox, without what would run before, or instead of, the judge's programs."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

from evaluators.patch_rules import matcher
from evaluators.patch_space import tail
from evaluators.placing import inside, stand_ins
from polar import changes as archive
from polar.errors import EvaluatorError
from polar.judge import Changes
from polar.sandbox import Sandbox

_FILES = "files/"
_BIN = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin")
# Read by loaders, shells, interpreters and test runners at their start, from places where no task has to write.
_STARTUP = [
    "etc/ld.so.preload", "etc/profile", "etc/profile.d", "etc/bash.bashrc", "etc/environment", "etc/zsh", "etc/gitconfig",
    "root/.bash*", "root/.profile", "root/.zsh*", "root/.gitconfig", "root/.config/git", "root/.pip", "root/.config/pip",
    "home/*/.bash*", "home/*/.profile", "home/*/.zsh*", "home/*/.gitconfig", "**/sitecustomize.py", "**/usercustomize.py",
    "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "**/ld-linux*", "**/libc.so*",
    "**/libc-*.so", "**/libpthread*.so*", "**/libdl*.so*",
]  # fmt: skip


class TooLarge(Exception):
    """The agent changed more than is collected."""


def restore(
    sandbox: Sandbox, changes: Changes, own: list[str], left: Callable[[], float], *, protect: bool = True
) -> list[str]:
    """Bring `changes` in, but nothing at the judge's `own` paths. Returns what stays as the image has it although the agent
    changed it (nothing without `protect`). Raises TooLarge, InfraError, EvaluatorError."""
    if changes.truncated:
        raise TooLarge("the agent's changes are more than is collected (artifact_limit_bytes)")
    under = inside(sandbox, changes.under)
    prefix = under.strip("/") + "/" if under != "/" else ""
    kept = _guarded(sandbox, changes.archive, prefix, left) if protect else []
    own = [*(inside(sandbox, p).strip("/") for p in own), "proc", "sys", "dev"]
    exclude = tuple(p.removeprefix(prefix) for p in (*own, *kept) if p.startswith(prefix))
    if prefix:
        made = sandbox.exec(["mkdir", "-p", under], cwd="/", timeout=left())
        if made.exit_code != 0:
            raise EvaluatorError(f"can't make {under}: {tail(made)}", code="prepare_failed")
    archive.apply(sandbox, changes.archive, under, timeout=left(), exclude=exclude)
    return kept


def _guarded(sandbox: Sandbox, path: Path, prefix: str, left: Callable[[], float]) -> list[str]:
    """Paths (from `/`, without it) of an archive of what lies below `prefix` that no agent may change."""
    commands, startup = _commands(sandbox, left()), matcher(_STARTUP)
    assert startup is not None
    found = [prefix + p for p in archive.removed(path)]
    links, pth = set(), set()
    with tarfile.open(path, "r:") as tar:
        for m in archive.members(tar):
            if m.name.startswith(_FILES):
                found.append(name := prefix + m.name.removeprefix(_FILES))
                if m.issym():
                    links.add(name)
                if name.endswith(".pth") and _runs_code(tar, m):
                    pth.add(name)
    names = list(dict.fromkeys(found))
    base = sandbox.ref.workdir.strip("/")
    top = base + "/" if base else ""
    planted = stand_ins(
        (n.removeprefix(top) for n in names if n.startswith(top)),
        {n.removeprefix(top) for n in links if n.startswith(top)},
    )
    planted = {top + p for p in planted}
    planted -= {p.strip("/") for p in _existing(sandbox, {f"/{p}" for p in planted}, left())}

    def guarded(name: str) -> bool:
        folder, _, last = name.rpartition("/")
        return (
            startup.match(name) is not None or (folder in _BIN and last in commands) or name in pth or name in planted
        )

    return [n for n in names if guarded(n)]


def _commands(sandbox: Sandbox, timeout: float) -> set[str]:
    """Names of the image's own programs."""
    folders = " ".join("/" + b for b in _BIN)
    r = sandbox.exec(f"ls -a {folders} 2>/dev/null", cwd="/", timeout=timeout, output_limit=4 << 20)
    return {
        line for line in r.output.decode("utf-8", "surrogateescape").splitlines() if line and not line.endswith(":")
    }


def _existing(sandbox: Sandbox, paths: set[str], timeout: float) -> set[str]:
    """Which of these the image has; one command, for an agent may make any number."""
    if not paths:
        return set()
    script = 'xargs -0 -r sh -c \'for p; do [ ! -e "$p" ] || printf "%s\\0" "$p"; done; true\' sh'
    r = sandbox.exec(script, cwd="/", stdin=archive.encode(paths), timeout=timeout, output_limit=4 << 20)
    if r.exit_code != 0:
        raise EvaluatorError(f"can't look at the image's modules: {tail(r)}", code="prepare_failed")
    return set(archive.decode(r.output))


def _runs_code(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bool:
    """A `.pth` file with lines that begin with `import`."""
    source = tar.extractfile(member) if member.isreg() else None
    lines = source.read(1 << 20).splitlines() if source else [b"import"]
    return any(line.lstrip().startswith(b"import") for line in lines)
