"""A closed check of the numbers: captured log-probabilities against a plain forward pass over the finished traces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.logprobs import embedded, measure

pytestmark = pytest.mark.engine
URL, MODEL = os.environ.get("POLAR_ENGINE_URL"), os.environ.get("POLAR_ENGINE_MODEL")


def check(result: dict[str, Any], tolerance: float) -> None:
    merged = result["prefix_merging"]
    assert result["exact"]["max_abs"] <= tolerance and result["tree"]["max_abs"] <= tolerance
    assert result["exact"]["segments"] == result["tree"]["segments"] == merged["segments"] == 9
    # Two of the three sessions drift, after their first and second turn.
    assert merged["flagged"] == 3 and merged["disagreeing"] == [], merged["per_segment"]


@pytest.mark.parametrize("model", ["tiny-random", pytest.param("smollm2-135m-instruct", marks=pytest.mark.slow)])
def test_with_the_embedded_engine(model: str, tmp_path: Path):
    pytest.importorskip("torch", reason="the embedded engine isn't installed")
    from engine.errors import ModelError
    from engine.models import prepare

    try:
        folder = prepare(model, tmp_path)
    except ModelError as e:
        pytest.skip(str(e))
    with embedded(str(folder), tmp_path) as url:
        check(measure(url, folder, sessions=3, turns=3, max_new=16, tolerance=1e-4), 1e-4)


@pytest.mark.skipif(not (URL and MODEL), reason="POLAR_ENGINE_URL and POLAR_ENGINE_MODEL (its folder) aren't set")
def test_with_an_engine_at_hand():
    tolerance = float(os.environ.get("POLAR_ENGINE_TOLERANCE", "0.05"))
    check(measure(str(URL), Path(str(MODEL)), sessions=3, turns=3, max_new=24, tolerance=tolerance), tolerance)
