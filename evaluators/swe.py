"""`swe`: the agent's patch on a pristine repository, and the instance's tests: what failed must pass, what passed must stay.

Built for SWE-bench, SWE-Gym, SWE-smith and Nemotron-style instances; everything it needs stands in the config.
"""

from __future__ import annotations

import posixpath
import tempfile
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from evaluators import controls, patch, patch_file, running
from evaluators.controls import Edit, Tampered, Unconfirmed
from evaluators.patch import Patch, Rejected
from evaluators.patch_space import Space
from evaluators.reports import FRESH, Status
from evaluators.running import Ran
from evaluators.swe_config import Config, load
from evaluators.swe_grading import evaluation, grade
from polar.errors import EvaluatorError, NotFound
from polar.judge import Outcome
from polar.result import Evaluation
from polar.sandbox import Sandbox

_FILE_LIMIT = 16 << 20
# What tests leave behind is nobody's patch, and a start-up file of a user must not be read.
_ENV = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1", "PYTEST_ADDOPTS": "-p no:cacheprovider"}


class Swe:
    """Codes of its EvaluatorErrors: `tests_crashed`, `evaluation_timeout`, `no_report`, `test_patch_failed`, `wrong_base`,
    `prepare_failed`. Reasons for a failed verdict: those of `patch.Rejected`, `tampered`, `unconfirmed`, `skipped_tests`,
    and the first three where the agent is to blame."""

    name = "swe"
    needs_sandbox = True

    def __init__(self, config: Config):
        self.config = config
        source = config.patch.source
        self.changes_under = config.repo if source == "changes" else None
        self.collects: tuple[str, ...] = () if source == "changes" else (source,)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Swe:
        return cls(load(config, cls.name))

    def evaluate(self, outcome: Outcome) -> Evaluation:
        return _Case(self.config, outcome).judge()


class _Case:
    def __init__(self, config: Config, outcome: Outcome):
        self.config, self.outcome = config, outcome
        self.patch = Patch()
        self.tests = config.tests()
        self.runs: list[dict[str, Any]] = []
        # A hanging run must leave time for one without the patch.
        budget, runs = outcome.task.evaluation_timeout_seconds, config.reruns.n + 1
        self.limit = config.timeout_seconds or running.share(budget, runs)

    def left(self) -> float:
        return running.left(self.outcome.remaining)

    def judge(self) -> Evaluation:
        try:
            space = self._space(self.outcome.sandbox())
            self._check_base(space)
            self.tests = sorted({*self.tests, *patch_file.named(space, "test.diff", self.config.test_patch.encode())})
            self.patch = self._get_patch(space)
            if not self.patch.data.strip() and not self.config.run_empty:
                raise Rejected("empty_patch", "the agent changed nothing that counts")
            statuses, ran = self._run_all(space)
            if ran.error is not None:
                return self._blame(ran)
            code = ran.result.exit_code or 0
            result = grade(self.config, statuses, code)
            if result.outcome_reward:
                result = self._confirm(result, statuses)
        except Rejected as e:
            return self._failed(e.code, e.message)
        result.report |= {"patch": self.patch.report(), "runs": self.runs}
        return result

    def _failed(self, code: str, message: str, reward: float = 0.0) -> Evaluation:
        report: dict[str, Any] = {"reason": code, "message": message, "patch": self.patch.report()}
        return evaluation(reward, report | ({"runs": self.runs} if self.runs else {}))

    # -- the patch

    def _space(self, sandbox: Sandbox) -> Space:
        return Space(sandbox, self.config.repo, self.left)

    def _check_base(self, space: Space) -> None:
        base = self.config.base_commit
        if base:
            r = space.sh('$G merge-base --is-ancestor "$1" HEAD', base, check=False)
            if r.exit_code:
                message = f"the image's repository at {self.config.repo} does not stand on {base}"
                raise EvaluatorError(message, code="wrong_base", retryable=False)

    def _get_patch(self, space: Space) -> Patch:
        rules = self.config.patch
        keep = lambda name, data: (self.outcome.logs / name).write_bytes(data)  # noqa: E731
        if rules.source == "changes":
            return patch.extract(space, self.outcome.changes, rules, self.tests, keep)
        host = self.outcome.artifacts.get(rules.source)
        if host is None or host.is_symlink() or not host.is_file():
            raise Rejected("empty_patch", f"the agent left no file at {rules.source}")
        if host.stat().st_size > rules.limit_bytes:
            raise Rejected("patch_too_large", f"the patch is larger than {rules.limit_bytes} bytes")
        return patch_file.take(space, host.read_bytes(), rules, self.tests, keep, limit=self.limit)

    # -- runs

    def _run_all(self, first: Space) -> tuple[dict[str, Status], Ran]:
        """Statuses by test id over all runs; the last run stands for the others where it counts."""
        rules = self.config.reruns
        ran = self._run(first, "tests", self.patch)
        if ran.findings is None or rules.n == 1:
            return dict(ran.findings.tests if ran.findings else {}), ran
        seen = [ran.findings.tests]
        for n in range(2, rules.n + 1):
            again = self._fresh_run(f"tests{n}", self.patch)
            if again.findings is not None:
                seen.append(again.findings.tests)
                ran = again
        passed = Counter(t for tests in seen for t, s in tests.items() if s in ("passed", "xfailed"))
        statuses: dict[str, Status] = {}
        for tests in seen:
            for t, s in tests.items():
                enough = passed[t] >= rules.required
                # The status of a run that agrees with the count.
                if (s in ("passed", "xfailed")) == enough or t not in statuses:
                    statuses[t] = s
        return statuses, ran

    def _fresh_run(self, name: str, agent: Patch, edit: Edit | None = None) -> Ran:
        """In a sandbox of its own, which goes right after."""
        with self._another() as sandbox:
            return self._run(self._space(sandbox), name, agent, edit)

    def _another(self) -> AbstractContextManager[Sandbox]:
        if self.outcome.another is None:
            raise EvaluatorError("no second sandbox can be had here", retryable=False)
        return running.passing(self.outcome.another())

    def _run(self, space: Space, name: str, agent: Patch, edit: Edit | None = None) -> Ran:
        """The tests over the pristine repository with a patch, in a sandbox of their own."""
        c = self.config
        patch.apply(space, agent.data, "agent.diff")
        try:
            self._apply_tests(space)
        except Rejected as e:
            if agent.data.strip() and self._tests_apply_alone():
                raise Rejected("test_patch_failed", f"only with the agent's patch: {e.message}") from e
            raise EvaluatorError(f"the test patch: {e.message}", code="test_patch_failed", retryable=False) from e
        for f in c.files:
            space.sandbox.write(posixpath.join(c.repo, f.target), f.content.encode(), mode=f.mode)
        if edit is not None:
            self._edit(space, edit)
        spec = self.outcome.task.evaluator
        wanted = getattr(c.report, "path", FRESH)
        ran = running.run(
            space.sandbox,
            c.test_command,
            c.report,
            report_path=f"{space.folder}/report" if wanted == FRESH else posixpath.join(c.repo, wanted),
            env={**_ENV, **(spec.env if spec else {}), **c.env},
            cwd=c.repo,
            limit=self.limit,
            left=self.left,
            log=self.outcome.logs / f"{name}.log",
            crash_codes=c.crash_exit_codes,
        )
        line: dict[str, Any] = {"run": name, "exit_code": ran.result.exit_code, "seconds": round(ran.result.seconds, 2)}
        if ran.findings is not None:
            wants = [*c.fail_to_pass, *c.pass_to_pass]
            line["passed"] = sum(ran.findings.tests.get(t) in ("passed", "xfailed") for t in wants)
        if ran.error is not None:
            line["error"] = ran.error.code
        self.runs.append(line)
        return ran

    def _apply_tests(self, space: Space) -> None:
        patch.apply(space, self.config.test_patch.encode(), "test.diff", three_way=True)

    def _tests_apply_alone(self) -> bool:
        with self._another() as sandbox:
            try:
                self._apply_tests(self._space(sandbox))
            except Rejected:
                return False
        return True

    def _edit(self, space: Space, edit: Edit) -> None:
        with tempfile.TemporaryDirectory() as temp:
            for n, path in enumerate(self.tests):
                inside, host = posixpath.join(self.config.repo, path), Path(temp) / str(n)
                try:
                    cut = space.sandbox.download(inside, host, limit=_FILE_LIMIT)
                except NotFound:
                    continue
                if not cut and host.is_file():
                    source = host.read_bytes()
                    edited = edit(path, source)
                    if edited != source:
                        space.sandbox.write(inside, edited, mode=host.stat().st_mode & 0o777)

    # -- whose fault, and whether it is true

    def _blame(self, ran: Ran) -> Evaluation:
        """Tests that came to no end: the agent's failure, if they do come to one without its patch."""
        assert ran.error is not None
        if ran.excuse is None:
            raise ran.error
        if ran.excuse not in self.config.treat_as_failed:
            without = self._fresh_run("pristine", Patch())
            if without.findings is None:
                raise ran.error
        return self._failed(ran.error.code, ran.error.message)

    def _confirm(self, result: Evaluation, statuses: dict[str, Status]) -> Evaluation:
        c = self.config

        slow = 2 * max((r["seconds"] for r in self.runs), default=0.0)

        def trial(edit: Edit, name: str) -> dict[str, Status] | None:
            ran = self._fresh_run(name, self.patch, edit)
            # Earlier runs came to their ends far sooner: to hang in this one is no way out of it. A busy machine is another
            # matter, and what the budget ends is nobody's.
            hangs = ran.excuse == "timeout" and ran.result.seconds >= slow
            if ran.error is not None and (ran.excuse is None or (ran.excuse == "timeout" and not hangs)):
                raise ran.error
            return ran.findings.tests if ran.findings else None

        claimed = [t for t in c.fail_to_pass if statuses.get(t) in controls.PASSING]
        skipped = [t for t in c.pass_to_pass if statuses.get(t) == "skipped"]
        if skipped and c.controls.trials:
            # The code under test can skip what it broke: only what is skipped without it, too, is as it was.
            without = self._fresh_run("pristine", Patch())
            before = without.findings.tests if without.findings else {}
            if broken := [t for t in skipped if before.get(t) in controls.PASSING]:
                return self._failed("skipped_tests", f"skipped only with the patch: {', '.join(broken[:5])}")
        try:
            result.report["controls"] = controls.check(c.controls, statuses, claimed, c.pass_to_pass, trial)
        except Tampered as e:
            return self._failed("tampered", str(e), c.controls.tampered_reward)
        except Unconfirmed as e:
            return self._failed("unconfirmed", str(e))
        return result
