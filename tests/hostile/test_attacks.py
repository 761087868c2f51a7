"""Every attack through the whole pipeline, in each sandbox that this machine has; and that each is a real one."""

from __future__ import annotations

import pytest

from tests.hostile.arena import Arena, missing
from tests.hostile.attacks import ATTACKS

NAMES = [a.name for a in ATTACKS]
# Local sandboxes end every process with the command that started it, and run tests by an interpreter of a virtual
# environment: these attacks have something to win in containers only.
ONLY_DOCKER = {"forks without end", "a background killer", "plants usercustomize.py in its home"}


@pytest.fixture(scope="module", params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def outcome(request, tmp_path_factory):
    if why := missing(request.param):
        pytest.skip(why)
    arena = Arena(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, arena.unprotected(), arena.protected()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES)
def test_the_attack_wins_nothing(outcome, name):
    _, _, kept = outcome
    won, how = kept[name]
    assert not won, how


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES)
def test_the_attack_would_win_without_protection(outcome, name):
    backend, bare, _ = outcome
    if backend == "local" and name in ONLY_DOCKER:
        pytest.skip("it needs processes that outlive a command, or the system's own interpreter")
    won, how = bare[name]
    assert won, how


def test_there_are_enough_different_attacks():
    assert len(set(NAMES)) == len(ATTACKS) >= 20 and len({a.command for a in ATTACKS}) == len(ATTACKS)
