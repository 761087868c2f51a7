"""Warm sandboxes that once could have been handed out wrongly."""

from __future__ import annotations

import os
import time

from polar.task import RuntimeSpec, Volume
from runtimes.warm_shape import wish
from tests.runtimes.conftest import until

_COARSE = 5  # the clock that files are dated by (CLOCK_REALTIME_COARSE)


def test_a_folder_that_got_the_old_ones_number_is_another(tmp_path):
    """The idle sandbox still has the removed one mounted."""
    volume, seen = tmp_path / "volume", []
    for _ in range(8):
        volume.mkdir()
        found = wish(RuntimeSpec(volumes=[Volume(source=str(volume), target="/data")]), None)
        assert found is not None
        seen.append((found.key, os.stat(volume).st_ino))
        volume.rmdir()
        now = time.clock_gettime_ns(_COARSE)
        until(lambda now=now: time.clock_gettime_ns(_COARSE) != now)
    assert len({key for key, _ in seen}) == len(seen)
