"""Bundles without a network: what is refused, replaced and left behind, and the programs that start what is inside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import bundles, images
from harness_adapters.versions import versions
from polar.errors import InvalidConfig


def fake(monkeypatch, text: str = "one") -> None:
    def npm(harness, made: Path) -> None:
        (made / "file").write_text(text)

    monkeypatch.setattr(bundles, "_npm", npm)


def test_a_current_bundle_is_left_alone_and_an_old_one_replaced(tmp_path, monkeypatch):
    fake(monkeypatch)
    target = bundles.build("pi", tmp_path)
    assert (
        target == tmp_path / "pi"
        and json.loads((target / "bundle.json").read_text())["version"] == versions().harnesses["pi"].version
    )
    fake(monkeypatch, "two")
    bundles.build("pi", tmp_path)
    assert (target / "file").read_text() == "one"
    (target / "bundle.json").write_text("{}")
    bundles.build("pi", tmp_path)
    assert (target / "file").read_text() == "two"
    bundles.build("pi", tmp_path, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["pi"]


def test_a_failed_bundle_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch):
    fake(monkeypatch)
    target = bundles.build("pi", tmp_path)

    def broken(harness, made: Path) -> None:
        (made / "half").write_text("x")
        raise bundles.BundleError("the network is away")

    monkeypatch.setattr(bundles, "_npm", broken)
    with pytest.raises(bundles.BundleError):
        bundles.build("pi", tmp_path, force=True)
    assert (target / "file").exists() and [p.name for p in tmp_path.iterdir()] == ["pi"]


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(InvalidConfig, match=r"'claude' has no package; allowed: claude_code, codex"):
        bundles.known(["pi", "claude"])
    assert bundles.known([]) == list(versions().harnesses) and bundles.known(["pi", "pi"]) == ["pi"]
    with pytest.raises(InvalidConfig, match=r"--python: '3', allowed"):
        bundles.build("mini_swe_agent", tmp_path, python="3")


def test_a_failing_tool_is_quoted():
    with pytest.raises(bundles.BundleError, match="no such package"):
        bundles._call([sys.executable, "-c", "import sys; sys.exit('no such package')"])


def script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("runtime_missing", [False, True])
def test_a_node_program_runs_from_anywhere_and_by_a_link(tmp_path, runtime_missing):
    """The node is a stand-in that, if it lacks its runtime, only works with the bundle's."""
    check = '[ -n "$LD_LIBRARY_PATH" ] || exit 127; ' if runtime_missing else ""
    bundle = tmp_path / "a b" / "pi"
    script(
        bundle, "node/bin/node", f'#!/bin/sh\n{check}[ "$1" = --version ] || echo "$@" "${{LD_LIBRARY_PATH##*/pi/}}"\n'
    )
    script(bundle, "bin/pi", bundles._NODE.format(entry="node_modules/x/cli.js"))
    link = tmp_path / "pi"
    link.symlink_to(bundle / "bin/pi")
    for program in (bundle / "bin/pi", link):
        out = subprocess.run([program, "an arg"], capture_output=True, text=True, check=True).stdout
        assert out.split()[0].endswith("node_modules/x/cli.js") or "node_modules/x/cli.js an arg" in out
        assert ("node/lib" in out) == runtime_missing


def test_a_python_program_says_which_python_it_needs(tmp_path):
    program = script(tmp_path, "bin/mini", bundles._PYTHON.format(minor="3.99", command="mini"))
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 127 and "needs Python 3.99" in done.stderr
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    program = script(tmp_path, "bin/mini", bundles._PYTHON.format(minor=minor, command="mini"))
    (tmp_path / "main.py").write_text(bundles._MAIN.format(command="mini", module="agent", attr="app"))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/agent.py").write_text("import sys\ndef app():\n    print(sys.argv)\n    return 5\n")
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run([program, "x y"], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (5, "['mini', 'x y']\n"), done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["build", "all", "pi"], "'all' is an image of its own"),
        (["build", "pi", "codex", "--tag", "x"], "--tag: one name for 2 images"),
        (["build", "nothing"], "'nothing' has no package"),
        (["bundle", "nothing"], "'nothing' has no package"),
    ],
)
def test_the_command_refuses(args, message, tmp_path):
    result = CliRunner().invoke(images.app, [*args, "--to", str(tmp_path)])
    assert isinstance(result.exception, InvalidConfig) and message in result.exception.message


def test_list(tmp_path, monkeypatch):
    fake(monkeypatch)
    bundles.build("codex", tmp_path)
    (tmp_path / "pi").mkdir()
    result = CliRunner().invoke(images.app, ["list", "--to", str(tmp_path), "--json"])
    states = {r["harness"]: r["bundle"] for r in json.loads(result.output)}
    assert states["codex"] == "current" and states["pi"] == "old" and states["opencode"] == "none"
