"""The agent's patch: what differs between the pristine repository and its state, as bytes that `git apply` takes.

Nothing of the agent's runs or is configured while it is made: of its sandbox only file contents, modes and links come in.
They never reach the work tree either: two trees are written to an object store of our own, and the patch is what is between
them. So commits, hooks, attributes, filters and index tricks of the agent don't matter, and the work tree stays pristine.
"""

from __future__ import annotations

import bisect
import io
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from evaluators import runner_config
from evaluators.patch_rules import PatchRules, Protection, parents
from evaluators.patch_space import Space, tail
from polar import changes as archive
from polar.errors import EvaluatorError
from polar.judge import Changes
from polar.sandbox import ExecResult

_FILES = "files/"
CONFIG_LIMIT = 4 << 20


class Rejected(Exception):
    """The patch is at fault, and with it the attempt. Codes: `empty_patch`, `patch_too_large`, `patch_does_not_apply`,
    `patch_touches_protected`, `patch_leaves_repository`, `test_patch_failed`."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code, self.message = code, message


class Patch(Struct, kw_only=True):
    """`files`: paths it touches. `protected`: what was changed but left out because the agent may not change it."""

    data: bytes = b""
    files: list[str] = field(default_factory=list)
    protected: list[str] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        out: dict[str, Any] = {"bytes": len(self.data), "files": len(self.files)}
        if self.protected:
            out["protected"] = self.protected[:50]
        return out


class Pristine:
    """What the fresh sandbox has in the repository, files and links, without any `.git`."""

    def __init__(self, space: Space):
        space.sh(
            'find . -name .git -prune -o ! -type d -print0 >"$D/listing" && find . -name .git -prune -print0 >"$D/roots"'
        )
        self.paths = sorted(p[2:] for p in space.names("listing"))
        self._known = set(self.paths)
        # Repositories inside, submodules among them: each has its own ignore rules and index.
        self.roots = sorted({p[2:].rpartition("/")[0] for p in space.names("roots")}, key=len, reverse=True)
        self.tracked: set[str] = set()
        for n, root in enumerate(self.roots):
            space.sh('$G -C "./$1" ls-files -z >"$D/tracked.$2"', root, str(n), check=False)
            self.tracked.update(_join(root, p) for p in space.names(f"tracked.{n}"))

    def has(self, path: str) -> bool:
        return path in self._known or next(self.below(path), None) is not None

    def is_file(self, path: str) -> bool:
        return path in self._known

    def below(self, folder: str) -> Iterator[str]:
        prefix = folder + "/"
        for i in range(bisect.bisect_left(self.paths, prefix), len(self.paths)):
            if not self.paths[i].startswith(prefix):
                return
            yield self.paths[i]

    def ignored(self, space: Space, paths: list[str]) -> set[str]:
        """Those of `paths` that the pristine ignore rules cover. Tracked files never are."""
        out: set[str] = set()
        todo = [p for p in paths if p not in self.tracked]
        for root in self.roots:
            mine = [p for p in todo if not root or p.startswith(root + "/")]
            todo = [] if not root else [p for p in todo if not p.startswith(root + "/")]
            if mine:
                cut = len(root) + 1 if root else 0
                space.put("asked", [p[cut:] for p in mine])
                space.sh('$G -C "./$1" check-ignore --no-index -z --stdin <"$D/asked" >"$D/ignored"', root, check=False)
                out.update(_join(root, p) for p in space.names("ignored"))
        return out


class _State:
    """The agent's files as the archive has them."""

    def __init__(self, path: Path):
        self.removed = archive.removed(path)
        self.files: dict[str, str] = {}  # git mode by path
        self.folders: list[str] = []
        with tarfile.open(path, "r:") as tar:
            for m in tar:
                if not m.name.startswith(_FILES):
                    continue
                name = m.name[len(_FILES) :].rstrip("/")
                if m.isdir():
                    self.folders.append(name)
                else:
                    self.files[name] = "120000" if m.issym() else "100755" if m.mode & 0o100 else "100644"

    def read(self, archive: Path, name: str) -> bytes | None:
        if self.files.get(name, "120000") == "120000":
            return None
        with tarfile.open(archive, "r:") as tar:
            found = tar.extractfile(_FILES + name)
            return readable(found.read(CONFIG_LIMIT + 1)) if found else None

    @staticmethod
    def pack(path: Path, names: list[str], target: Path) -> None:
        """Contents of `names` as a flat archive: the nth as file n. Nothing in it has a name of the agent's."""
        number = {n: i for i, n in enumerate(names)}
        with tarfile.open(path, "r:") as tar, tarfile.open(target, "w") as out:
            for m in tar:
                i = number.get(m.name[len(_FILES) :]) if m.name.startswith(_FILES) else None
                if i is None:
                    continue
                if m.issym():
                    data = m.linkname.encode("utf-8", "surrogateescape")
                    info, source = tarfile.TarInfo(str(i)), io.BytesIO(data)
                    info.size = len(data)
                else:
                    found = tar.extractfile(m)
                    assert found is not None
                    info, source = tarfile.TarInfo(str(i)), found  # type: ignore[assignment]
                    info.size = m.size if m.isreg() else _size(tar, m)
                out.addfile(info, source)


def readable(data: bytes) -> bytes:
    """A configuration file of the agent's. One too long to be looked at is like nothing that the image can have."""
    return data if len(data) <= CONFIG_LIMIT else b"\xff"


def _size(tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    return tar.getmember(member.linkname).size


def extract(
    space: Space, changes: Changes | None, rules: PatchRules, tests: list[str], keep: Callable[[str, bytes], None]
) -> Patch:
    """The patch of an attempt, made in a fresh sandbox. `keep(name, data)` stores it. Raises Rejected, EvaluatorError."""
    if changes is None:
        raise Rejected("empty_patch", "the agent's sandbox has no such repository any more")
    pristine = Pristine(space)
    state = _State(changes.archive)
    kept, guarded = _select(space, state, pristine, Protection(rules, tests), rules)
    if changes.truncated:
        raise Rejected("patch_too_large", "the agent's changes are more than is collected")
    guard(space, pristine, rules, kept, guarded, lambda path: state.read(changes.archive, path))
    taken = [p for p in [*kept, *guarded] if p in state.files]
    space.open_store()
    with tempfile.TemporaryDirectory() as temp:
        flat = Path(temp) / "flat.tar"
        state.pack(changes.archive, taken, flat)
        space.sandbox.upload(flat, f"{space.folder}/flat.tar")
    space.put("pristine", [p for p in [*kept, *guarded] if pristine.is_file(p)])
    space.put("flat.names", "".join(f"{i}\n" for i in range(len(taken))).encode())
    space.sh(_FIRST_TREE)
    shas = space.get("shas").decode().split()
    if len(shas) != len(taken):
        raise EvaluatorError("contents of the agent's files are missing", code="prepare_failed")
    after = {p: f"{state.files[p]} {sha}" for p, sha in zip(taken, shas, strict=True)}
    before = dict(_entry(line) for line in space.names("before"))
    # A back-end may send files that are as they were: only a difference is a change.
    patch = Patch(protected=[p for p in guarded if before.get(p) != after.get(p)])
    finish(space, patch, rules, kept, after)
    keep("patch.diff", patch.data)
    return patch


def guard(
    space: Space,
    pristine: Pristine,
    rules: PatchRules,
    kept: list[str],
    guarded: list[str],
    read: Callable[[str], bytes | None],
) -> None:
    """Move from `kept` to `guarded` what sets up test runners, and what would stand in the place of something guarded.
    `read` gives a file as the agent left it."""
    refused: set[str] = set()
    if rules.protect_hooks:
        shared = [p for p in kept if runner_config.is_shared(p)]
        refused |= {p for p in shared if runner_config.changed(p, space.read(p), read(p))}
    standing = {p for p in [*guarded, *refused] if pristine.is_file(p)}
    above = {a for p in standing for a in parents(p)}
    refused |= {p for p in kept if p in above or not standing.isdisjoint(parents(p))}
    kept[:] = [p for p in kept if p not in refused]
    guarded += sorted(refused)


def finish(space: Space, patch: Patch, rules: PatchRules, kept: list[str], after: dict[str, str]) -> None:
    """Write the patch: what of `kept` differs from the first tree in the index. `after` has `mode sha` by path, nothing of
    what is gone. Raises Rejected."""
    if patch.protected and rules.on_protected == "fail":
        raise Rejected("patch_touches_protected", f"the agent changed {', '.join(patch.protected[:5])}")
    zero = "0" * 40
    # Removals first: a folder may stand where a file was, or the other way round.
    lines = [f"0 {zero}\t{p}" for p in kept if p not in after] + [f"{after[p]}\t{p}" for p in kept if p in after]
    space.put("info", b"".join(line.encode("utf-8", "surrogateescape") + b"\0" for line in lines))
    space.sh(_PATCH)
    patch.files = space.names("touched")
    try:
        patch.data = space.get("patch", rules.limit_bytes)
    except OverflowError:
        raise Rejected("patch_too_large", f"the patch is larger than {rules.limit_bytes} bytes") from None


def _entry(line: str) -> tuple[str, str]:
    """Path and `mode sha` of a line of `git ls-files -s`."""
    info, _, path = line.partition("\t")
    mode, sha, _ = info.split(" ")
    return path, f"{mode} {sha}"


_FIRST_TREE = """
export GIT_DIR="$D/git" GIT_WORK_TREE="$PWD" GIT_INDEX_FILE="$D/index"
$G read-tree --empty && $G update-index --add -z --stdin <"$D/pristine" && $G write-tree >"$D/t0" &&
$G ls-files -s -z >"$D/before" || exit 1
mkdir "$D/flat" && tar -xf "$D/flat.tar" -C "$D/flat" && rm "$D/flat.tar" && cd "$D/flat" &&
$G hash-object -w --no-filters --stdin-paths <"$D/flat.names" >"$D/shas" && cd / && rm -rf "$D/flat"
"""
_PATCH = """
export GIT_DIR="$D/git" GIT_WORK_TREE="$PWD" GIT_INDEX_FILE="$D/index"
$G update-index -z --index-info <"$D/info" && $G write-tree >"$D/t1" || exit 1
options="-r -M --no-ext-diff --no-textconv --no-color --src-prefix=a/ --dst-prefix=b/"
$G diff-tree $options -p --binary --full-index "$(cat "$D/t0")" "$(cat "$D/t1")" >"$D/patch" &&
$G diff-tree -r --no-renames --name-only -z "$(cat "$D/t0")" "$(cat "$D/t1")" >"$D/touched"
"""


def _select(
    space: Space, state: _State, pristine: Pristine, protection: Protection, rules: PatchRules
) -> tuple[list[str], list[str]]:
    """Paths that may have changed or gone: those of the patch, and protected ones."""
    gone: set[str] = set()
    for path in state.removed:
        gone.update([path] if pristine.is_file(path) else [], pristine.below(path))
    for path in state.files:  # a folder gave way to a file
        gone.update(pristine.below(path))
    gone.update(path for path in state.folders if pristine.is_file(path))  # a file gave way to a folder
    candidates = [p for p in sorted({*state.files, *gone}) if ".git" not in p.lower().split("/")]
    ignored = set() if rules.keep_ignored else pristine.ignored(space, candidates)
    kept: list[str] = []
    guarded: list[str] = []
    for path in candidates:
        if path not in ignored and not protection.excluded(path):
            (guarded if protection.protected(path, pristine.has) else kept).append(path)
    return kept, guarded


def apply(space: Space, data: bytes, name: str, *, three_way: bool = False) -> None:
    """Apply a patch to the work tree. Raises Rejected: `patch_leaves_repository`, `patch_does_not_apply`."""
    if not data.strip():
        return
    space.put(name, data)
    r = space.sh(_APPLY, name, check=False)
    if r.exit_code and three_way:
        first = r
        r = space.sh(_THREE_WAY, name, check=False)
        if r.exit_code:
            raise refusal(name, first)
    if r.exit_code:
        raise refusal(name, r)


_APPLY = """
unset GIT_DIR; [ -d "$D/git" ] || $G init -q --bare --template= "$D/git"
export GIT_DIR="$D/git" GIT_WORK_TREE="$PWD" && $G apply --whitespace=nowarn "$D/$1"
"""
# The repository's own objects hold the versions that the patch was made against; its index is not used.
_THREE_WAY = """
export GIT_INDEX_FILE="$D/index.3way" && $G read-tree HEAD && $G apply --numstat -z "$D/$1" | tr '\\0' '\\n' |
cut -f 3 | tr '\\n' '\\0' >"$D/wanted" && $G update-index --add --remove -z --stdin <"$D/wanted" &&
$G apply --3way --whitespace=nowarn "$D/$1"
"""


def refusal(name: str, r: ExecResult) -> Rejected:
    """What git said about a patch."""
    inside = ("invalid path", "beyond a symbolic link", "outside")
    leaves = any(w in tail(r) for w in inside)
    return Rejected("patch_leaves_repository" if leaves else "patch_does_not_apply", f"{name}: {tail(r)}")


def _join(root: str, path: str) -> str:
    return f"{root}/{path}" if root else path
