"""The published JSON Schemas say what the code says."""

from __future__ import annotations

from pathlib import Path

from polar.schemas import CONTRACTS, files, main, schema
from polar.task import TaskRequest

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"


def test_the_committed_schemas_are_current():
    assert main(["--check", str(FOLDER)]) == 0, "run: python -m polar.schemas docs/schemas"


def test_check_sees_what_is_old_missing_or_strange(tmp_path):
    assert main(["--check", str(tmp_path)]) == 1
    assert main([str(tmp_path)]) == 0 and main(["--check", str(tmp_path)]) == 0
    assert len(list(tmp_path.iterdir())) == len(CONTRACTS)
    (tmp_path / "settings.schema.json").write_text("{}")
    assert main(["--check", str(tmp_path)]) == 1
    assert main([str(tmp_path)]) == 0
    (tmp_path / "gone.schema.json").write_text("{}")
    assert main(["--check", str(tmp_path)]) == 1
    assert main([str(tmp_path)]) == 0 and not (tmp_path / "gone.schema.json").exists()


def test_every_reference_resolves_and_unknown_fields_are_refused():
    for typ in CONTRACTS:
        s = schema(typ)
        assert all(r.removeprefix("#/$defs/") in s["$defs"] for r in _refs(s))
    task = schema(TaskRequest)["$defs"]["TaskRequest"]
    assert task["additionalProperties"] is False and task["required"] == ["agent", "instruction"]
    assert files() == files(), "no default that changes from call to call"


def _refs(node) -> list[str]:
    if isinstance(node, dict):
        return [node["$ref"]] if "$ref" in node else [r for v in node.values() for r in _refs(v)]
    return [r for v in node for r in _refs(v)] if isinstance(node, list) else []
