"""`command_judge`: a program of the user's in a fresh sandbox, or a model, says what the work is worth."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from evaluators import judgement, patch, running
from evaluators.config import WHERE, check_path, read
from evaluators.llm import Llm, ask
from evaluators.llm import check as check_way
from evaluators.patch_rules import PatchRules
from evaluators.patch_space import Space, tail
from evaluators.placing import clear, restore
from evaluators.swe_config import TestFile
from polar.errors import EvaluatorError, InvalidTask, NotFound
from polar.judge import Outcome
from polar.result import Evaluation
from polar.sandbox import Sandbox
from polar.task import Env, Seconds


class Config(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Exactly one of `command` and `llm`. `collect`: paths of the agent's sandbox that are judged; `repo`: a folder whose
    patch is. A command finds `files` and what was collected in place, the patch and a description in the files named by
    $POLAR_PATCH and $POLAR_INPUT, and writes its judgement to the file named by $POLAR_REPORT. A reward from `pass_at` on is
    a pass; rewards lie between `low` and `high`. `limit_chars` bounds each text that a model is shown."""

    command: Annotated[str, Meta(min_length=1)] | None = None
    llm: Llm | None = None
    files: list[TestFile] = field(default_factory=list)
    collect: list[str] = field(default_factory=list)
    repo: str | None = None
    patch: PatchRules = field(default_factory=PatchRules)
    env: Env = field(default_factory=dict)
    cwd: str | None = None
    timeout_seconds: Seconds | None = None
    low: float = 0.0
    high: float = 1.0
    pass_at: float = 1.0
    limit_chars: Annotated[int, Meta(ge=100)] = 100_000


class CommandJudge:
    """Codes of its EvaluatorErrors: `judge_unavailable`, `bad_judgement`, `tests_crashed`, `evaluation_timeout`, `no_report`."""

    name = "command_judge"

    def __init__(self, config: Config):
        self.config = config
        self.needs_sandbox = config.command is not None or config.repo is not None
        self.collects: tuple[str, ...] = tuple(config.collect)
        self.changes_under = config.repo

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CommandJudge:
        c = read(config, Config, cls.name)
        check_way(c.llm, c.command, WHERE)
        c.patch.check("patch")
        if c.patch.source != "changes":
            raise InvalidTask(
                f"{WHERE}.patch.source: found '{c.patch.source}', allowed: changes; use collect for a file"
            )
        for n, path in enumerate(c.collect):
            check_path(path, f"collect[{n}]", folder=True)
        for n, f in enumerate(c.files):
            check_path(f.target, f"files[{n}].target")
        if c.repo is not None:
            check_path(c.repo, "repo", folder=True)
        if not c.low < c.high:
            raise InvalidTask(f"{WHERE}.low: found {c.low}, allowed is less than high ({c.high})")
        if c.llm is not None and (c.files or c.env):
            raise InvalidTask(f"{WHERE}: 'files' and 'env' belong to 'command'")
        return cls(c)

    def evaluate(self, outcome: Outcome) -> Evaluation:
        diff = self._patch(outcome)
        return self._ask(outcome, diff) if self.config.llm else self._run(outcome, diff)

    def _patch(self, outcome: Outcome) -> bytes:
        c = self.config
        if c.repo is None:
            return b""
        space = Space(outcome.sandbox(), c.repo, lambda: running.left(outcome.remaining))
        try:
            keep = lambda name, data: (outcome.logs / name).write_bytes(data)  # noqa: E731
            return patch.extract(space, outcome.changes, c.patch, [], keep).data
        except patch.Rejected as e:
            return judgement.printable(f"no patch: {e.code}: {e.message}\n").encode()

    def _judgement(self, outcome: Outcome, data: bytes) -> judgement.Judgement:
        return judgement.read(data, len(_units(outcome)), self.config.low, self.config.high)

    # -- by a model

    def _ask(self, outcome: Outcome, diff: bytes) -> Evaluation:
        c = self.config
        assert c.llm is not None
        material = {"task": outcome.task.instruction, "how the agent's run ended": outcome.termination}
        if c.repo is not None:
            material["patch"] = diff.decode("utf-8", "replace") or "(empty)"
        for path in c.collect:
            material[f"file {path}"] = _text(outcome.artifacts.get(path), c.limit_chars)
        cut = {k: v if len(v) <= c.limit_chars else v[: c.limit_chars] + "\n[cut]" for k, v in material.items()}
        found, tries = ask(
            c.llm,
            cut,
            len(_units(outcome)),
            (c.low, c.high),
            lambda data: self._judgement(outcome, data),
            lambda: running.left(outcome.remaining),
        )
        (outcome.logs / "judgement.json").write_bytes(
            json.dumps({"reward": found.reward, "reason": found.reason}).encode()
        )
        return judgement.evaluation(found, c.pass_at, self.name, model=c.llm.model, tries=tries)

    # -- by a program

    def _run(self, outcome: Outcome, diff: bytes) -> Evaluation:
        c, sandbox = self.config, outcome.sandbox()
        assert c.command is not None
        left = running.left(outcome.remaining)
        missing = restore(sandbox, c.collect, outcome.artifacts)
        clear(sandbox, [f.target for f in c.files], c.collect, left)
        for f in c.files:
            sandbox.write(f.target, f.content.encode(), mode=f.mode)
        space = Space(sandbox, "/", lambda: running.left(outcome.remaining))
        space.put("patch.diff", diff)
        space.put("input.json", json.dumps(_describe(outcome, missing)).encode())
        spec = outcome.task.evaluator
        names = {"POLAR_INPUT": "input.json", "POLAR_PATCH": "patch.diff", "POLAR_REPORT": "report"}
        result = sandbox.exec(
            c.command,
            env={**(spec.env if spec else {}), **c.env, **{k: f"{space.folder}/{v}" for k, v in names.items()}},
            cwd=c.cwd,
            timeout=min(c.timeout_seconds or float("inf"), running.left(outcome.remaining)),
            log=outcome.logs / "judge.log",
        )
        if result.timed_out:
            raise EvaluatorError(f"the judge ran {result.seconds:.1f} s: {tail(result)}", code="evaluation_timeout")
        if result.exit_code != 0:
            raise EvaluatorError(
                f"the judge ended with exit code {result.exit_code}: {tail(result)}", code="tests_crashed"
            )
        sandbox.stop()
        found = self._judgement(outcome, _report(sandbox, f"{space.folder}/report"))
        more = {"missing_artifacts": missing} if missing else {}
        return judgement.evaluation(found, c.pass_at, self.name, seconds=round(result.seconds, 3), **more)


def _units(outcome: Outcome) -> list[dict[str, Any]]:
    """What may have a reward of its own, in the order of `trace_rewards`: each trace, or each call of a packed tree."""
    found = [(t.trace_id, t.role, len(t.prompt_ids), len(t.response_ids)) for t in outcome.trajectory.traces]
    if packed := outcome.trajectory.packed:
        for c in packed.calls:
            prompt = int(packed.positions[c.context]) + 1 if c.context >= 0 else 0
            found.append((c.trace_id, c.role, prompt, c.end - c.start))
    names = ("trace_id", "role", "prompt_tokens", "response_tokens")
    return [dict(zip(names, unit, strict=True)) for unit in found]


def _report(sandbox: Sandbox, path: str) -> bytes:
    with tempfile.TemporaryDirectory() as temp:
        target = Path(temp) / "report"
        try:
            cut = sandbox.download(path, target, limit=judgement.MAX_BYTES)
        except NotFound:
            raise EvaluatorError("the judge wrote nothing to $POLAR_REPORT", code="no_report") from None
        if cut or target.is_symlink() or not target.is_file():
            raise EvaluatorError("the judge's report is no file of an ordinary size", code="no_report")
        return target.read_bytes()


def _describe(outcome: Outcome, missing: list[str]) -> dict[str, Any]:
    return {
        "task_id": outcome.task.task_id,
        "session_id": outcome.session_id,
        "attempt": outcome.attempt,
        "instruction": outcome.task.instruction,
        "metadata": outcome.task.metadata,
        "termination": outcome.termination,
        "missing_artifacts": missing,
        "traces": _units(outcome),
    }


def _text(path: Path | None, limit: int) -> str:
    """A file's text, or those of a folder's files, as far as the limit goes."""
    if path is None or path.is_symlink() or not path.exists():
        return "(missing)"
    if path.is_file():
        with open(path, "rb") as f:
            return f.read(4 * limit).decode("utf-8", "replace")
    out, left = [], limit
    for p in sorted(p for p in path.rglob("*") if p.is_file() and not p.is_symlink()):
        if left <= 0:
            break
        with open(p, "rb") as f:
            text = f"== {p.relative_to(path)}\n" + f.read(4 * left).decode("utf-8", "replace")
        out.append(text)
        left -= len(text)
    return "\n".join(out)
