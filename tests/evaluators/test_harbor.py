"""Harbor tasks: the agent's final state, judged in a fresh sandbox by a verifier that it has never seen."""

from __future__ import annotations

import pytest
from folder_sandbox import outcome

from evaluators.harbor import Harbor
from polar.errors import EvaluatorError, InvalidTask
from polar.judge import Changes

PLAIN = {"controls": {"trials": 0}}
CHECK = 'mkdir -p /logs/verifier; if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n'


@pytest.fixture
def judge(make, place, tmp_path):
    """Judge what `work` leaves by a test.sh; `state` is as much of the file system as the back-end lets an agent change."""

    def judge(work: str, script: str, files: dict[str, str] | None = None, **config):
        box = make()
        baseline = box.baseline("/")
        assert box.exec(work, timeout=60).exit_code == 0
        box.stop()
        cut = box.changes(tmp_path / "c.tar", under="/", baseline=baseline, limit=1 << 24)
        made = []

        def fresh():
            made.append(make())
            for name, content in ({"test.sh": script} | (files or {})).items():
                made[-1].write(f"/tests/{name}", content.encode())
            made[-1].write("/logs/verifier/old", b"")
            return made[-1]

        first = fresh()
        out = outcome(tmp_path, first)
        out.changes, out.another = Changes(under="/", archive=tmp_path / "c.tar", truncated=cut), fresh
        return Harbor.from_config(config).evaluate(out)

    return judge


def test_the_final_state_is_judged(judge):
    e = judge("echo 42 >answer.txt", CHECK, **PLAIN)
    assert (e.verdict, e.outcome_reward) == ("passed", 1.0)
    assert judge("echo 41 >answer.txt", CHECK, **PLAIN).verdict == "failed"


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
    ],
)
def test_config_is_strict(config, message):
    with pytest.raises(InvalidTask, match=message):
        Harbor.from_config(config)
