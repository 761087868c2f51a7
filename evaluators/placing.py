"""Put the agent's work and then the tests into a fresh sandbox, so that what the agent made can't stand in the way."""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Iterable
from pathlib import Path

from evaluators import runner_config
from evaluators.patch_rules import HOOKS, matcher, shadowing
from polar.errors import EvaluatorError, NotFound
from polar.sandbox import Sandbox

# Links first (argv up to "--"): a folder that the agent replaced by a link would send the tests somewhere else.
_CLEAR = """
while [ "$1" != -- ]; do if [ -L "$1" ]; then rm -f -- "$1" || exit 1; fi; shift; done
shift
[ $# -eq 0 ] || rm -rf -- "$@"
"""


def inside(sandbox: Sandbox, path: str) -> str:
    """`path` as an absolute, normal path inside."""
    return posixpath.normpath(posixpath.join(sandbox.ref.workdir, path))


def restore(sandbox: Sandbox, paths: list[str], artifacts: dict[str, Path]) -> list[str]:
    """Upload what was collected from the agent's sandbox to where it came from. Returns what is missing."""
    missing = []
    for path in paths:
        host = artifacts.get(path)
        # A link on this host is no artifact, whatever it points to.
        if host is None or host.is_symlink() or not host.exists():
            missing.append(path)
        else:
            sandbox.upload(host, path)
    return missing


def stand_ins(paths: Iterable[str], links: set[str]) -> set[str]:
    """Those of `paths` (relative to a folder on the import path; `links`: those that are links) by which Python would import
    something else than a test runner's module. Without them a folder of such a name stands in for nothing."""
    found = set()
    for path in paths:
        module = shadowing(path, runners_only=True)
        if module is None and path in links:  # to a package, perhaps
            module = shadowing(f"{path}/__init__.py", runners_only=True)
        if module is not None and (path == module or path.startswith(f"{module}/__init__.")):
            found.add(path)
    return found


def without_hooks(sandbox: Sandbox, paths: list[str], artifacts: dict[str, Path]) -> list[str]:
    """Take out of collected folders, on this host, what would start with a test runner or an interpreter, or stand in for
    one: hooks, new modules of their names, and files whose part for test runners differs from the image's. Returns what went."""
    hooks = matcher(HOOKS)
    assert hooks is not None
    gone = []
    for path in paths:
        folder = artifacts.get(path)
        if folder is None or folder.is_symlink() or not folder.is_dir():
            continue
        names = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
        planted = {
            n
            for n in stand_ins(names, {n for n, p in names.items() if p.is_symlink()})
            if _read(sandbox, posixpath.join(path, n)) is None
        }
        for name, found in sorted(names.items()):
            if hooks.match(name) or name in planted or name.endswith(".pyc"):
                found.unlink()
                gone.append(posixpath.join(path, name))
            elif runner_config.is_shared(name) and not found.is_symlink():
                before = _read(sandbox, posixpath.join(path, name))
                if runner_config.changed(name, before, found.read_bytes()):
                    found.unlink()
                    gone.append(posixpath.join(path, name))
    return gone


def _read(sandbox: Sandbox, path: str) -> bytes | None:
    with tempfile.TemporaryDirectory() as temp:
        target = Path(temp) / "file"
        try:
            sandbox.download(path, target, limit=1 << 22)
        except NotFound:
            return None
        return target.read_bytes() if target.is_file() and not target.is_symlink() else None


def clear(sandbox: Sandbox, targets: list[str], restored: list[str], timeout: float) -> None:
    """Remove whatever lies at `targets`, and links among their parent folders below the restored paths."""
    if not targets:
        return
    roots = [inside(sandbox, r) for r in restored]
    full = [inside(sandbox, t) for t in targets]
    links = list(dict.fromkeys(p for t in full for p in _parents_below(t, roots)))
    result = sandbox.exec(["sh", "-c", _CLEAR, "clear", *links, "--", *full], timeout=timeout)
    if result.exit_code != 0:
        text = result.output.decode("utf-8", "replace").strip()[-500:]
        raise EvaluatorError(f"can't clear the places of the tests: {text or result.exit_code}")


def _parents_below(target: str, roots: list[str]) -> list[str]:
    """Parent folders of `target` strictly below any of `roots`, from the top."""
    out = []
    parent = posixpath.dirname(target)
    while parent != "/":
        if any(parent.startswith(root.rstrip("/") + "/") for root in roots):
            out.append(parent)
        parent = posixpath.dirname(parent)
    return out[::-1]
