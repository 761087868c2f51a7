"""A patch file that the agent wrote, brought to the form of `patch.extract`: what git makes of it, less what it may not touch.

No name is read out of the file: git applies it to an index that holds nothing but what it names, and the trees before and
after tell what changed, with modes, links and both ends of a rename.
"""

from __future__ import annotations

from collections.abc import Callable

from evaluators import patch
from evaluators.patch import Patch, Pristine, Rejected
from evaluators.patch_rules import PatchRules, Protection
from evaluators.patch_space import Space

_NAME = "agent.diff"


def named(space: Space, name: str, data: bytes) -> list[str]:
    """Paths that git reads in a patch, before and after renames. Nothing if it finds no patch."""
    if not data.strip():
        return []
    space.put(name, data)
    if space.sh(_NAMES, name, check=False).exit_code:
        return []
    return sorted({line.split("\t", 2)[2] for line in [*space.names("names"), *space.names("names.old")]})


def take(
    space: Space,
    data: bytes,
    rules: PatchRules,
    tests: list[str],
    keep: Callable[[str, bytes], None],
    *,
    limit: float = float("inf"),
) -> Patch:
    """`limit`: seconds that git may take for it. Raises Rejected, EvaluatorError."""
    if not data.strip():
        return Patch()
    pristine = Pristine(space)
    space.put("pristine", [n for n in named(space, _NAME, data) if pristine.is_file(n)])
    space.sh(_BEFORE)
    r = space.sh(_AFTER, _NAME, check=False, limit=limit)
    if r.timed_out:
        raise Rejected("patch_does_not_apply", f"{_NAME}: git took longer than {limit:.0f} s")
    if r.exit_code:
        raise patch.refusal(_NAME, r)
    lines = space.names("changed")
    after = {}
    protection, kept, guarded = Protection(rules, tests), list[str](), list[str]()
    for info, path in zip(lines[::2], lines[1::2], strict=True):
        _, mode, _, sha, status = info.split(" ")
        if status != "D":
            after[path] = f"{mode} {sha}"
        if not protection.excluded(path):
            (guarded if protection.protected(path, pristine.has) else kept).append(path)
    patch.guard(space, pristine, rules, kept, guarded, lambda path: _content(space, after.get(path, "")))
    found = Patch(protected=guarded)
    patch.finish(space, found, rules, kept, after)
    keep("patch.diff", found.data)
    return found


def _content(space: Space, entry: str) -> bytes | None:
    mode, _, sha = entry.partition(" ")
    if not mode.startswith("100"):
        return None
    space.sh('GIT_DIR="$D/git" $G cat-file blob "$1" >"$D/blob"', sha)
    try:
        return patch.readable(space.get("blob", patch.CONFIG_LIMIT))
    except OverflowError:
        return patch.readable(bytes(patch.CONFIG_LIMIT + 1))


# Reversed, a patch names what it starts from.
_NAMES = """
unset GIT_DIR; [ -d "$D/git" ] || $G init -q --bare --template= "$D/git"
export GIT_DIR="$D/git" GIT_WORK_TREE="$PWD"
$G apply --numstat -z "$D/$1" >"$D/names" && $G apply --numstat -z -R "$D/$1" >"$D/names.old"
"""
_BEFORE = """
export GIT_DIR="$D/git" GIT_WORK_TREE="$PWD" GIT_INDEX_FILE="$D/index"
$G read-tree --empty && $G update-index --add -z --stdin <"$D/pristine" && $G write-tree >"$D/t0" &&
cp "$D/index" "$D/index.after"
"""
# The repository's objects hold the versions that the patch may have been made against; they are only read. Not every git
# merges within an index, so that is done in a folder that holds what is in it.
_AFTER = """
objects="$($G rev-parse --git-path objects 2>/dev/null)" && objects="$(cd "$objects" 2>/dev/null && pwd)" &&
printf '%s\n' "$objects" >"$D/git/objects/info/alternates"
export GIT_DIR="$D/git" GIT_WORK_TREE="$PWD" GIT_INDEX_FILE="$D/index.after"
$G apply --cached --whitespace=nowarn "$D/$1" || (
    mkdir "$D/merge" && cd "$D/merge" && export GIT_WORK_TREE="$PWD" && $G checkout-index -q -a -u &&
    $G apply --3way --whitespace=nowarn "$D/$1" >/dev/null 2>&1
) || exit 1
rm -rf "$D/merge"; $G write-tree >"$D/t1" &&
$G diff-tree -r --no-renames --no-abbrev -z "$(cat "$D/t0")" "$(cat "$D/t1")" >"$D/changed"
"""
