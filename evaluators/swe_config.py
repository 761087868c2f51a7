"""Config of `swe`: one instance, its tests, and how hard to look."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from evaluators.config import WHERE, check_path, read
from evaluators.controls import ControlRules
from evaluators.patch_rules import PatchRules
from evaluators.reports import AnyReport, ExitCode, Pytest, RewardFile
from evaluators.running import CRASH_CODES, Excuse
from evaluators.swebench_logs import SwebenchLog
from polar.errors import InvalidTask
from polar.task import Env, Seconds

Count = Annotated[int, Meta(ge=1, le=20)]
_HEADER = re.compile(
    r'^(?:diff --git |--- |\+\+\+ |rename from |rename to )"?(?:[ab]/)?(.*?)"?(?:\t.*)?$', re.MULTILINE
)


class Reruns(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Run the tests `n` times, each in a fresh sandbox; a test has passed that passed `required` times."""

    n: Count = 1
    required: Count = 1


class TestFile(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A file that only the judge's sandboxes ever see."""

    target: str
    content: str
    mode: Annotated[int, Meta(ge=0, le=0o777)] = 0o644


class Config(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`repo`: the repository's folder. `fail_to_pass`, `pass_to_pass`: full test ids as the report tells them. Tests come
    from `test_patch` and `files`; `test_files`: further paths of tests that the image has. `report` says how the output of
    `test_command` is read. `partial`: reward for a part of fail_to_pass, or of all tests. `timeout_seconds` bounds one run;
    by default it is a share of the evaluation's budget. `run_empty`: run the tests although nothing changed.
    `treat_as_failed`: what is the agent's failure at once; otherwise the tests are tried without its patch, and a crash that
    comes with the patch only is its failure."""

    test_command: Annotated[str, Meta(min_length=1)]
    fail_to_pass: Annotated[list[str], Meta(min_length=1)]
    pass_to_pass: list[str] = field(default_factory=list)
    instance_id: str = ""
    repo: str = "/testbed"
    base_commit: str = ""
    test_patch: str = ""
    files: list[TestFile] = field(default_factory=list)
    test_files: list[str] = field(default_factory=list)
    report: AnyReport | SwebenchLog = field(default_factory=Pytest)
    env: Env = field(default_factory=dict)
    timeout_seconds: Seconds | None = None
    partial: Literal["none", "fail_to_pass", "all"] = "none"
    run_empty: bool = False
    patch: PatchRules = field(default_factory=PatchRules)
    controls: ControlRules = field(default_factory=ControlRules)
    reruns: Reruns = field(default_factory=Reruns)
    crash_exit_codes: list[int] = field(default_factory=lambda: list(CRASH_CODES))
    treat_as_failed: list[Excuse] = field(default_factory=list)

    def tests(self) -> list[str]:
        """Every path, relative to the repository, that a test is known to be written in."""
        ids = (t.partition("::")[0] for t in [*self.fail_to_pass, *self.pass_to_pass] if "::" in t)
        named = (i for i in ids if re.fullmatch(r"[\w@+./-]+\.\w+", i) and not i.startswith("/") and ".." not in i)
        return sorted({*self.test_files, *(f.target for f in self.files), *patched(self.test_patch), *named})


def patched(diff: str) -> list[str]:
    """Paths that a patch names, as it writes them. Of a data set's patch only: git may read them otherwise."""
    out: set[str] = set()
    for m in _HEADER.finditer(diff):
        if m[0].startswith("diff --git "):
            halves = m[0][len("diff --git ") :].replace('"', "").split(" b/")
            out.update(h.removeprefix("a/") for h in halves)
        else:
            out.add(m[1])
    return sorted(out - {"/dev/null", "dev/null", ""})


def load(config: dict[str, Any], name: str) -> Config:
    c = read(config, Config, name)
    c.patch.check("patch")
    check_path(c.repo, "repo", folder=True)
    for n, path in enumerate(c.test_files):
        _relative(path, f"test_files[{n}]")
    for n, f in enumerate(c.files):
        _relative(f.target, f"files[{n}].target")
    if isinstance(c.report, ExitCode | RewardFile) or "reward" in getattr(c.report, "pattern", ""):
        raise InvalidTask(
            f"{WHERE}.report: single tests are judged; use pytest, junit, tap, swebench, or regex with 'id'"
        )
    if both := sorted(set(c.fail_to_pass) & set(c.pass_to_pass)):
        raise InvalidTask(f"{WHERE}.fail_to_pass: '{both[0]}' stands in pass_to_pass too")
    if c.reruns.required > c.reruns.n:
        raise InvalidTask(f"{WHERE}.reruns.required: found {c.reruns.required}, allowed is at most n ({c.reruns.n})")
    if c.base_commit and not re.fullmatch(r"[0-9a-f]{7,64}", c.base_commit):
        raise InvalidTask(f"{WHERE}.base_commit: '{c.base_commit}' is no commit id")
    return c


def _relative(path: str, field: str) -> None:
    if check_path(path, field).startswith("/"):
        raise InvalidTask(f"{WHERE}.{field}: '{path}' is not relative to the repository")
