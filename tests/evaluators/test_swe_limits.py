"""How long one run of an instance's tests may take, so that others fit beside it."""

from __future__ import annotations

import pytest
from folder_sandbox import outcome
from msgspec.structs import replace

from cli.dataset_swe import Rules, convert
from evaluators.swe import Swe, _Case
from evaluators.swe_config import Config, load
from polar.codec import convert as typed
from polar.task import TaskRequest

CONFIG = {"test_command": "x", "fail_to_pass": ["t"]}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({}, 250.0),
        ({"controls": {"trials": 0}}, 250.0),
        ({"reruns": {"n": 3}, "controls": {"trials": 5}}, 125.0),
        ({"timeout_seconds": 400}, 400.0),
    ],
)
def test_a_run_has_its_share_of_the_whole_budget(tmp_path, config, limit):
    """Whatever is left of it."""
    for left in (500.0, 3.0):
        o = outcome(tmp_path, seconds=left)
        o.task = replace(o.task, evaluation_timeout_seconds=500)
        assert _Case(load(CONFIG | config, "swe"), o).limit == pytest.approx(limit)


def test_imported_instances_have_limits_that_fit():
    row = {"instance_id": "a__b-1", "repo": "a/b", "problem_statement": "p", "patch": "", "FAIL_TO_PASS": ["t.py::t"],
           "PASS_TO_PASS": [], "test_patch": ""}  # fmt: skip
    data = convert(row, Rules("swegym", command="true"), "row").task
    task = typed({"task_id": "t", "agent": {"harness": "shell", "command": "true"}, **data}, TaskRequest, "row")
    assert task.evaluator is not None
    config: Config = Swe.from_config(task.evaluator.config).config
    assert config.timeout_seconds is not None
    assert task.evaluation_timeout_seconds >= (config.reruns.n + config.controls.trials + 3) * config.timeout_seconds
