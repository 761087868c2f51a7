"""New traces from a stored capture: the function, and `polar results rebuild` on a folder of objects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from attempt_maker import EOT, completion, continued

from polar.codec import compress, decompress, pack, unpack
from polar.completion import Completion
from polar.errors import PolarError
from polar.export import read_result
from polar.objects import open_objects
from polar.result import ErrorInfo, Evaluation, SessionResult, capture_key, result_key
from polar.task import BuilderSpec
from polar.trace import Fidelity, Trajectory
from reconstruction import registry, rewards
from reconstruction.rebuild import rebuild

DRIFTED = [
    completion(0, [1], [2, EOT]),
    completion(1, [1, 3, EOT, 5], [6, EOT]),
    continued(2, completion(1, [1, 3, EOT, 5], [6, EOT]), [7], [8, EOT]),
]


def stored(builder: str, evaluation: Evaluation | None, completions: list[Completion] = DRIFTED) -> SessionResult:
    trajectory = registry.build(BuilderSpec(strategy=builder), completions)
    rewards.apply(trajectory, evaluation or Evaluation(verdict="not_evaluated"))
    return SessionResult(
        session_id="t.s0",
        task_id="t",
        sample_index=0,
        attempt=1,
        termination="finished",
        verdict=evaluation.verdict if evaluation else "not_evaluated",
        reward=evaluation.outcome_reward if evaluation else None,
        trajectory=trajectory,
        evaluation=evaluation,
        capture_key=capture_key("t", "t.s0", 1),
    )


@pytest.mark.parametrize("builder", ["per_request", "prefix_merging", "exact", "tree"])
def test_the_outcome_reward_goes_to_the_new_traces(builder):
    old = stored("prefix_merging", Evaluation(verdict="passed", outcome_reward=1.0))
    new = rebuild(old, DRIFTED, BuilderSpec(strategy=builder))
    assert (new.verdict, new.reward, new.trajectory.builder) == ("passed", 1.0, builder)
    assert {u.reward for u in rewards.units(new.trajectory)} == {1.0}
    assert pack(registry.build(BuilderSpec(strategy=builder), DRIFTED)) != pack(new.trajectory)  # which has none
    assert old.trajectory.builder == "prefix_merging"


def test_rewards_of_single_traces_follow_their_completions():
    given = Evaluation(verdict="partial", outcome_reward=0.5, trace_rewards=[0.25, 0.75, None])
    old = stored("per_request", given)
    new = rebuild(old, DRIFTED, BuilderSpec(strategy="tree"))
    assert [c.reward for c in new.trajectory.packed.calls] == [0.25, 0.75, 0.5]
    assert new.evaluation.trace_rewards == [0.25, 0.75, 0.5]
    # c1 and c2 are one trace under `exact`, and were rewarded differently: that is nobody's to average.
    new = rebuild(old, DRIFTED, BuilderSpec(strategy="exact"))
    assert [t.reward for t in new.trajectory.traces] == [0.25, None]
    assert new.trajectory.traces[1].metadata["reward"] == "mixed" and new.reward == 0.5
    # And back: what was given to a trace is given to its completions.
    back = rebuild(rebuild(old, DRIFTED, BuilderSpec(strategy="tree")), DRIFTED, BuilderSpec(strategy="per_request"))
    assert [t.reward for t in back.trajectory.traces] == [0.25, 0.75, 0.5]


def test_what_was_not_judged_stays_so_and_a_failed_builder_is_forgotten():
    old = stored("exact", None)
    old.trajectory = Trajectory(builder="none", fidelity=Fidelity(completions=3, sampled_tokens=6, left_out={"x": 6}))
    old.error = ErrorInfo(code="reconstruction_failed", message="")
    new = rebuild(old, DRIFTED, BuilderSpec())
    assert new.error is None and new.evaluation is None and [t.reward for t in new.trajectory.traces] == [None, None]


@pytest.mark.parametrize("fault", ["lost", "another attempt"])
def test_another_capture_is_refused(fault):
    old = stored("exact", None)
    wrong = DRIFTED[:2] if fault == "lost" else [msgspec.structs.replace(c, attempt=2) for c in DRIFTED]
    with pytest.raises(PolarError) as e:
        rebuild(old, wrong, BuilderSpec())
    assert e.value.code == "corrupt_capture"


def moody(completions, config):
    """Depends on the order in which completions come in."""
    out = registry.build(BuilderSpec(strategy="per_request"), completions)
    out.traces[0].metadata["first"] = completions[0].completion_id
    return out


def test_a_builder_that_is_not_deterministic_is_refused():
    with pytest.raises(PolarError, match="different traces"):
        rebuild(stored("exact", None), DRIFTED, BuilderSpec(strategy=f"{__name__}:moody"))


@pytest.fixture
def objects(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/objects"
    store = open_objects(url)
    old = stored("exact", Evaluation(verdict="passed", outcome_reward=1.0))
    store.put(old.capture_key, compress(pack(DRIFTED)))
    store.put(result_key("t", "t.s0", 1), compress(pack(old)))
    return url


def polar(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "cli.main", "results", "rebuild", *args], capture_output=True, text=True
    )


def test_the_command(objects, tmp_path):
    target = tmp_path / "new.msgpack.zst"
    r = polar("t.s0", "--objects", objects, "--builder", "prefix_merging", "--set", "end_of_turn=[9]", "--out",
              str(target), "--json")  # fmt: skip
    assert r.returncode == 0, r.stderr
    line = json.loads(r.stdout)
    assert (line["builder"], line["config"]["end_of_turn"], line["same_as_stored"]) == ("prefix_merging", [9], False)
    new = unpack(decompress(target.read_bytes()), SessionResult)
    assert len(new.trajectory.traces) == 1 and new.trajectory.traces[0].reward == 1.0
    assert read_result(objects, result_key("t", "t.s0", 1)).trajectory.builder == "exact"
    # The written file is a source again; without --builder it is only checked.
    r = polar(str(target), "--objects", objects)
    assert r.returncode == 0 and "the same traces" in r.stdout, r.stderr


def test_the_command_says_when_the_stored_traces_come_out_differently(objects):
    store = open_objects(objects)
    key = result_key("t", "t.s0", 1)
    old = read_result(store, key)
    old.trajectory.traces[0].weight = 0.9
    store.put(key, compress(pack(old)))
    r = polar("t.s0", "--objects", objects)
    assert r.returncode == 1 and "other traces than are stored" in r.stderr


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["t.s0", "--builder", "magic"], 2, "allowed: exact, per_request, prefix_merging, tree"),
        (["t.s0", "--builder", "exact", "--set", "eot=1"], 2, "builder.config.eot: unknown key"),
        (["t.s0", "--set", "weights"], 2, "--set: found 'weights', allowed: KEY=VALUE"),
        (["t.s0", "--out", "x.txt"], 2, "--out: found 'x.txt'"),
        (["t.s1"], 4, "t.s1"),
        (["nowhere/t.msgpack.zst"], 4, "no such file"),
        (["t.s0", "--capture", "nowhere"], 4, "no such file"),
    ],
)
def test_wrong_input(objects, args, code, says):
    r = polar(*args, "--objects", objects)
    assert r.returncode == code and says in r.stderr and len(r.stderr.splitlines()) == 1, r.stderr
