"""A folder of the judge's own in a fresh sandbox, and git used there without anything that an agent could have left."""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from polar.changes import decode, encode
from polar.errors import EvaluatorError, NotFound
from polar.sandbox import ExecResult, Sandbox

# Whatever .gitattributes say: bytes stay as they are.
_RAW = "* -text -ident -filter -working-tree-encoding !eol !diff !merge !conflict-marker-size\n"
_CONFIG = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.symlinks": "true",
    "core.fileMode": "true",
    "core.autocrlf": "false",
    "core.quotePath": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "diff.external": "",
    "gc.auto": "0",
    "safe.directory": "*",
}
LISTING_LIMIT = 256 << 20
_FILE_LIMIT = 16 << 20


class Space:
    """`folder` is absolute inside, fresh, and of a name that nobody can know. `repo` is the repository's folder."""

    def __init__(self, sandbox: Sandbox, repo: str, left: Callable[[], float]):
        self.sandbox, self.repo, self._left = sandbox, repo, left
        made = sandbox.exec('umask 077 && mktemp -d "${TMPDIR:-/tmp}/polar-XXXXXXXXXXXX"', timeout=left())
        self.folder = made.output.decode("utf-8", "replace").strip()
        if made.exit_code != 0 or not self.folder.startswith("/"):
            raise EvaluatorError(f"can't make a folder in the judge's sandbox: {self.folder or made.exit_code}")

    def sh(self, script: str, *arguments: str, check: bool = True, limit: float = float("inf")) -> ExecResult:
        """Run a script with $D, the folder, and `$G`, a git that knows no configuration but ours. One that runs for `limit`
        seconds has failed."""
        git = "git " + " ".join(f"-c {k}={v}" for k, v in _CONFIG.items())
        r = self.sandbox.exec(
            ["sh", "-c", script, "polar", *arguments],
            env={
                "D": self.folder, "G": git, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "LC_ALL": "C",
                "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "HOME": self.folder, "GIT_ATTR_NOSYSTEM": "1",
            },
            cwd=self.repo,
            timeout=min(limit, self._left()),
        )  # fmt: skip
        if r.timed_out and (check or r.seconds < limit - 0.5):
            raise EvaluatorError("no time left while the patch was made", code="evaluation_timeout")
        if check and r.exit_code != 0:
            raise EvaluatorError(
                f"preparing the judge's sandbox failed: {tail(r) or r.exit_code}", code="prepare_failed"
            )
        return r

    def put(self, name: str, data: bytes | Iterable[str]) -> None:
        """`name` in the folder; paths are written each ended by NUL."""
        self.sandbox.write(f"{self.folder}/{name}", data if isinstance(data, bytes) else encode(data))

    def get(self, name: str, limit: int = LISTING_LIMIT) -> bytes:
        """Raises OverflowError if it is longer than `limit`."""
        with tempfile.TemporaryDirectory() as temp:
            target = Path(temp) / "file"
            if self.sandbox.download(f"{self.folder}/{name}", target, limit=limit):
                raise OverflowError(name)
            return target.read_bytes()

    def read(self, path: str) -> bytes | None:
        """A file of the repository; None if there is no such file."""
        with tempfile.TemporaryDirectory() as temp:
            target = Path(temp) / "file"
            try:
                self.sandbox.download(posixpath.join(self.repo, path), target, limit=_FILE_LIMIT)
            except NotFound:
                return None
            return target.read_bytes() if target.is_file() and not target.is_symlink() else None

    def names(self, name: str) -> list[str]:
        return decode(self.get(name))

    def open_store(self) -> None:
        """An object store of our own: the repository's is only read."""
        self.put("attributes", _RAW.encode())
        self.sh(
            'git init -q --bare --template= "$D/git" && mkdir -p "$D/git/info" && mv "$D/attributes" "$D/git/info/"'
        )


def tail(r: ExecResult, n: int = 400) -> str:
    return " ".join(r.output.decode("utf-8", "replace").split())[-n:]
