"""Taking the future out of a repository, so that an agent can't read the fix in its history."""

from __future__ import annotations

# Leaves HEAD's own history (as one unnamed branch) and the work tree as they are. What other branches, tags, remotes,
# stashes and reflogs held goes, objects included; an index of before stays valid.
HIDE_FUTURE = """set -e
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
head=$(git rev-parse HEAD)
git checkout -q --detach "$head" 2>/dev/null || git update-ref --no-deref HEAD "$head"
git for-each-ref --format='%(refname)' | while read -r ref; do git update-ref -d "$ref"; done
for name in $(git remote); do git remote remove "$name"; done
rm -f "$(git rev-parse --git-path FETCH_HEAD)" "$(git rev-parse --git-path ORIG_HEAD)" "$(git rev-parse --git-path packed-refs)"
rm -rf "$(git rev-parse --git-path logs)"
git repack -adq
git prune --expire=now
git -c advice.detachedHead=false checkout -q -B main 2>/dev/null || true
"""


def hide_future(repo: str) -> str:
    """A shell command for a prepare step."""
    return f"cd '{repo}'\n{HIDE_FUTURE}"
