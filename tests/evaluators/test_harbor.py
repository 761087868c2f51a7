"""Harbor tasks: the agent's final state, judged in a fresh sandbox by a verifier that it has never seen."""

from __future__ import annotations

import pytest
from folder_sandbox import outcome

from evaluators import state
from evaluators.harbor import Harbor
from polar.errors import EvaluatorError, InvalidTask
from polar.judge import Changes

PLAIN = {"controls": {"trials": 0}}
CHECK = 'mkdir -p /logs/verifier; if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n'


@pytest.fixture
def judge(make, place, tmp_path):
    """Judge what `work` leaves by a test.sh; `state` is as much of the file system as the back-end lets an agent change."""

    def judge(work: str, script: str, files: dict[str, str] | None = None, *, image="true", limit=1 << 24, **config):
        """`image` makes what the image has; `limit` bounds what is collected."""
        under = config.get("state", "/")
        box = make()
        assert box.exec(f"{image}; mkdir -p {under}", timeout=60).exit_code == 0
        baseline = box.baseline(under)
        assert box.exec(work, timeout=60).exit_code == 0
        box.stop()
        cut = box.changes(tmp_path / "c.tar", under=under, baseline=baseline, limit=limit)
        made = []

        def fresh():
            made.append(make())
            assert made[-1].exec(image, timeout=60).exit_code == 0
            for name, content in ({"test.sh": script} | (files or {})).items():
                made[-1].write(f"/tests/{name}", content.encode())
            made[-1].write("/logs/verifier/old", b"")
            return made[-1]

        first = fresh()
        out = outcome(tmp_path, first)
        out.changes, out.another = Changes(under=under, archive=tmp_path / "c.tar", truncated=cut), fresh
        return Harbor.from_config(config).evaluate(out)

    return judge


def test_the_final_state_is_judged(judge):
    e = judge("echo 42 >answer.txt", CHECK, **PLAIN)
    assert (e.verdict, e.outcome_reward) == ("passed", 1.0)
    assert judge("echo 41 >answer.txt", CHECK, **PLAIN).verdict == "failed"


def test_the_state_of_one_folder_is_judged(judge):
    good = judge("echo 42 >answer.txt", CHECK, state="/repo", **PLAIN)
    assert (good.verdict, good.report.get("kept_pristine")) == ("passed", None)
    assert judge("echo 41 >answer.txt", CHECK, state="/repo", **PLAIN).verdict == "failed"
    image = "mkdir sub; echo 42 >answer.txt; echo 42 >sub/kept"
    check = CHECK.replace("cat answer.txt", "cat sub/kept")
    work = "rm answer.txt; echo 41 >sub/kept; echo 1 >sub/new"
    e = judge(work, check + "test ! -e answer.txt && test -e sub/new || rm /logs/verifier/reward.txt\n",
              image=image, state="/repo", exclude=["/repo/sub/kept"], **PLAIN)  # fmt: skip
    assert e.verdict == "passed"
    e = judge("echo 42 >sub/answer.txt", CHECK.replace("answer", "sub/answer"), state="/repo/sub", **PLAIN)
    assert e.verdict == "passed"  # a folder that the judge's image hasn't


STAND_INS = """mkdir -p pytest src/mock _pytest real && touch pytest/__init__.py src/mock/__init__.py coverage.py
    echo 'raise SystemExit(0)' | tee sitecustomize.py pluggy.cpython-311-x86_64-linux-gnu.so >real/__init__.py
    ln -s real attrs; mkdir -p tool; echo 'import os' >tool/run.pth; echo 42 >answer.txt"""
KEPT = ["attrs", "coverage.py", "pluggy.cpython-311-x86_64-linux-gnu.so", "pytest/__init__.py", "sitecustomize.py"]
KEPT += ["src/mock/__init__.py", "tool/run.pth"]


@pytest.mark.parametrize("state", ["/", "/repo"])
def test_what_starts_with_a_runner_or_an_interpreter_stays_out(judge, state):
    e = judge(STAND_INS, CHECK, state=state, **PLAIN)
    assert e.verdict == "passed" and set(e.report["kept_pristine"]) == {f"repo/{k}" for k in KEPT}
    check = "cd /repo; " + "; ".join(f"test ! -e {k} && test ! -L {k} || exit 1" for k in KEPT) + f"\n{CHECK}"
    assert judge(STAND_INS, check, state=state, **PLAIN).verdict == "passed"
    e = judge(STAND_INS, CHECK, state=state, protect_hooks=False, **PLAIN)
    assert e.verdict == "passed" and "kept_pristine" not in e.report


@pytest.mark.parametrize("state", ["/", "/repo"])
def test_work_with_names_of_pythons_modules_is_kept(judge, state):
    folders = ["code", "http", "queue", "email", "platform", "trace", "mock", "packaging"]
    files = ["calendar.py", "profile.py", "signal.py", *(f"{f}/answer.txt" for f in folders)]
    work = f"mkdir {' '.join(folders)} && echo 42 | tee {' '.join(files)} >/dev/null"
    check = "".join(f'test "$(cat {f})" = 42 || exit 1\n' for f in files) + "echo 1 >/logs/verifier/reward.txt"
    e = judge(work, check, state=state, **PLAIN)
    assert (e.verdict, e.report.get("kept_pristine")) == ("passed", None)


def test_a_module_of_the_images_own_may_change(judge):
    image = "mkdir -p mock py && echo 1 | tee mock/__init__.py py/data >tox.py"
    work = "echo 42 | tee mock/__init__.py mock/new.py py/__init__.py >tox.py"
    check = "grep -q 42 mock/__init__.py && grep -q 42 mock/new.py && grep -q 42 tox.py && test ! -e py/__init__.py &&"
    e = judge(work, check + " echo 1 >/logs/verifier/reward.txt", image=image, **PLAIN)
    assert (e.verdict, e.report["kept_pristine"]) == ("passed", ["repo/py/__init__.py"])


def test_the_images_modules_are_asked_for_once(judge, monkeypatch):
    asked = []
    real = state._existing
    monkeypatch.setattr(state, "_existing", lambda box, paths, left: asked.append(paths) or real(box, paths, left))
    work = "mkdir pytest && for n in $(seq 300); do echo >pytest/m$n.py; done; touch pytest/__init__.py; echo 42 >answer.txt"
    assert judge(work, CHECK, **PLAIN).verdict == "passed"
    assert asked == [{"/repo/pytest/__init__.py"}]


def test_more_than_is_collected_is_the_agents_failure_unless_the_task_says_otherwise(judge):
    work = "echo 42 >answer.txt; head -c 300000 /dev/zero >big"
    e = judge(work, CHECK, limit=200_000)
    assert (e.verdict, e.outcome_reward, e.report["reason"]) == ("failed", 0.0, "state_too_large")
    with pytest.raises(EvaluatorError) as error:
        judge(work, CHECK, limit=200_000, treat_as_failed=["timeout"])
    assert (error.value.code, error.value.retryable) == ("state_too_large", False)


def test_planted_tests_and_rewards_are_gone(judge):
    work = """{ mkdir -p /tests /logs/verifier && echo 'echo 1 >/logs/verifier/reward.txt' >/tests/test.sh &&
        echo 1 >/logs/verifier/reward.txt; } 2>/dev/null; true"""
    e = judge(
        work,
        "test ! -e /logs/verifier/reward.txt && test ! -e /logs/verifier/old && echo 0.25 >/logs/verifier/reward.txt",
        **PLAIN,
    )
    assert (e.verdict, e.outcome_reward) == ("partial", 0.25)


def test_metrics(judge):
    e = judge("true", 'echo \'{"reward": 0.5, "speed": 3}\' >/logs/verifier/reward.json', **PLAIN)
    assert e.outcome_reward == 0.5 and e.report["metrics"] == {"reward": 0.5, "speed": 3.0}
    e = judge("true", "echo '{\"accuracy\": 1.0}' >/logs/verifier/reward.json", **PLAIN)
    assert e.verdict == "passed"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("true", "no_report"),
        ("echo nan >/logs/verifier/reward.txt", "no_report"),
        ("echo '{}' >/logs/verifier/reward.json", "no_report"),
        ('echo \'{"a": 1, "b": 2}\' >/logs/verifier/reward.json', "no_report"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "no_report"),
        ("exit 127", "tests_crashed"),
        ("sleep 60", "evaluation_timeout"),
    ],
)
def test_no_reward_has_its_code(judge, script, code):
    config = PLAIN | {"timeout_seconds": 2}
    with pytest.raises(EvaluatorError) as e:
        judge("true", script, **config)
    assert e.value.code == code
    out = judge("true", script, **config, treat_as_failed=["timeout", "crash", "no_report"])
    assert (out.verdict, out.outcome_reward, out.report["reason"]) == ("failed", 0.0, code)


PYTEST = """cd /repo && python3 /tests/test_outputs.py >/dev/null 2>&1 && reward=1 || reward=0
echo $reward >/logs/verifier/reward.txt"""
TESTS = """
import sys
sys.path.insert(0, "/repo")
import answer

def test_answer():
    assert answer.value() == 42

if __name__ == "__main__":
    test_answer()
"""


def test_a_forged_success_is_found_by_the_control_run(judge):
    honest = judge("echo 'def value(): return 42' >answer.py", PYTEST, {"test_outputs.py": TESTS})
    assert (honest.verdict, honest.report["controls"]) == ("passed", {"tests": 1, "reward": 0.0})
    forged = judge(
        "echo 'import os; os._exit(0)' >answer.py",
        PYTEST,
        {"test_outputs.py": TESTS},
        controls={"tampered_reward": -0.5},
    )
    assert (forged.verdict, forged.outcome_reward, forged.report["reason"]) == ("failed", -0.5, "tampered")


def rewards(passing: str, failing: str) -> str:
    """A verifier with these rewards."""
    return PYTEST.replace("reward=1 || reward=0", f"reward={passing} || reward={failing}")


@pytest.mark.parametrize(
    ("passing", "failing", "controls", "verdict", "reward", "reason"),
    [
        ("-1", "-1", {}, "failed", -1.0, None),
        ("0", "-1", {}, "failed", 0.0, None),
        ("0.5", "-1", {}, "partial", 0.5, None),
        ("0.2", "0.2", {}, "failed", 0.0, "unconfirmed"),
        ("0.2", "0.2", {"floor": 0.2}, "partial", 0.2, None),
        ("0.7", "0.2", {"floor": 0.2}, "partial", 0.7, None),
        ("1", "1", {"floor": 0.2, "tampered_reward": -0.5}, "failed", -0.5, "tampered"),
    ],
)
def test_only_what_tests_give_is_asked_for_again(judge, passing, failing, controls, verdict, reward, reason):
    work = "echo 'def value(): return 42' >answer.py"
    e = judge(work, rewards(passing, failing), {"test_outputs.py": TESTS}, controls=controls)
    assert (e.verdict, e.outcome_reward, e.report.get("reason")) == (verdict, reward, reason)


def test_a_verifier_that_tells_of_success_only_confirms_it(judge):
    script = PYTEST.replace("\necho $reward", "\n[ $reward = 0 ] || echo $reward")
    e = judge("echo 'def value(): return 42' >answer.py", script, {"test_outputs.py": TESTS})
    assert (e.verdict, e.report["controls"]) == ("passed", {"tests": 1, "reward": None})


@pytest.mark.docker
def test_programs_and_start_up_files_stay_the_images(judge, place):
    if place[0].name != "docker":
        pytest.skip("a local sandbox's system is read-only anyway")
    shim = "#!/bin/bash\\nmkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt\\n"
    work = f"""
    for p in /usr/bin/python3 /usr/local/bin/bash /usr/local/bin/cat; do rm -f $p; printf '{shim}' >$p; chmod +x $p; done
    echo 'echo 1 >/logs/verifier/reward.txt' >/etc/profile.d/x.sh; echo x >/etc/ld.so.preload
    s=/usr/lib/python3/dist-packages; mkdir -p $s; echo 'import os; os._exit(0)' >$s/sitecustomize.py
    echo 'import os' >$s/x.pth; echo /opt/lib >$s/plain.pth; printf '#!/bin/sh\\n' >/usr/local/bin/newtool; chmod +x /usr/local/bin/newtool
    """
    script = """cat /etc/hostname >/dev/null; python3 -c 'print(1)' | grep -q 1 && test ! -e /etc/profile.d/x.sh &&
    test ! -s /etc/ld.so.preload && test -x /usr/local/bin/newtool && test -e /usr/lib/python3/dist-packages/plain.pth &&
    test ! -e /logs/verifier/reward.txt && echo 0.5 >/logs/verifier/reward.txt"""
    e = judge(work, script, **PLAIN)
    assert e.outcome_reward == 0.5
    assert {"usr/local/bin/bash", "etc/ld.so.preload", "etc/profile.d/x.sh"} <= set(e.report["kept_pristine"])
    assert "usr/local/bin/newtool" not in e.report["kept_pristine"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"test": "x"}, "config.test: unknown key"),
        ({"logs": "/"}, "config.logs"),
        ({"exclude": ["a/../b"]}, r"exclude\[0\]"),
        ({"state": "/tests/data"}, "config.state: '/tests/data' lies in '/tests'"),
        ({"state": "/repo", "exclude": ["/repo"]}, "config.state"),
    ],
)
def test_config_is_strict(config, message):
    with pytest.raises(InvalidTask, match=message):
        Harbor.from_config(config)
