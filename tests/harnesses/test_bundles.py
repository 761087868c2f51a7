"""Bundles without a network: what is refused, replaced and left behind, and the programs that start what is inside."""

from __future__ import annotations

import json
import re
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


def test_packages_from_pypi_are_pinned_to_the_last():
    pinned = {name: h for name, h in versions().harnesses.items() if h.pypi}
    assert pinned
    for name, harness in pinned.items():
        lines = bundles.constraints(name).read_text().splitlines()
        assert f"{harness.pypi}=={harness.version}" in lines and {"litellm", "openai"} <= {
            x.split("==")[0] for x in lines
        }
        assert [x for x in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", x)] == []


def test_other_pins_make_another_bundle(tmp_path, monkeypatch):
    """pip is a stand-in that is told what to install and from which pins."""
    said: list[list[str]] = []

    def pip(argv: list[str]) -> None:
        said.append([*argv, Path(argv[argv.index("-c") + 1]).read_text()])
        info = Path(argv[argv.index("--target") + 1]) / "mini.dist-info"
        info.mkdir(parents=True)
        (info / "entry_points.txt").write_text("[console_scripts]\nmini = agent:app\n")

    monkeypatch.setattr(bundles, "_call", pip)
    pins = tmp_path / "pins.txt"
    monkeypatch.setattr(bundles, "constraints", lambda name: pins)
    for text, times in (("litellm==1\n", 1), ("litellm==1\n", 1), ("litellm==2\n", 2)):
        pins.write_text(text)
        made = bundles.build("mini_swe_agent", tmp_path / "bundles")
        assert len(said) == times and said[-1][-1] == text
        assert bundles.is_current(made, "mini_swe_agent", bundles.here())
    assert "constraints" not in bundles.wanted("pi", bundles.here())


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
    (tmp_path / "main.py").write_text(bundles._MAIN.format(command="mini", version="1.2.3", module="agent", attr="app"))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/agent.py").write_text("import sys\ndef app():\n    print(sys.argv)\n    return 5\n")
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run([program, "x y"], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (5, "['mini', 'x y']\n"), done.stderr
    assert subprocess.run([program, "--version"], capture_output=True, text=True, env=env).stdout == "mini 1.2.3\n"


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


# It knows an image as soon as it has built it; its labels are those that it was given.
DOCKER = """#!/bin/sh
here=$(dirname "$0")
case $1 in
  run) echo 3.99; exit ;;
  image) [ -f "$here/$3" ] || exit 1; cat "$here/$3"; exit ;;
esac
for last; do :; done
{ echo "$@"; cd "$last"; find opt -type f; } >>"$here/said"
until [ "$1" = -t ]; do shift; done
image=$2 labels=
while [ $# -gt 0 ]; do [ "$1" = --label ] && labels="$labels,\\"${2%%=*}\\":\\"${2#*=}\\""; shift; done
echo "[{\\"Id\\":\\"x\\",\\"Config\\":{\\"Labels\\":{${labels#,}}}}]" >"$here/$image"
"""


def test_an_image_of_another_python_leaves_the_bundles_here_alone(tmp_path, monkeypatch):
    """The Docker client is a stand-in that writes down what it was given."""
    fake(monkeypatch)
    monkeypatch.setattr(bundles, "_python", lambda harness, made, python, pins: (made / "main.py").write_text(python))
    docker = script(tmp_path, "programs/docker", DOCKER)
    monkeypatch.setenv("PATH", f"{docker.parent}:/usr/bin:/bin")
    root = tmp_path / "bundles"
    mine = bundles.build("mini_swe_agent", root)
    build = ["build", "--to", str(root), "--base", "other:1"]
    result = CliRunner().invoke(images.app, build)
    assert result.exit_code == 0 and result.output.strip() == "polar-sandbox:all", result.exception
    said = (docker.parent / "said").read_text()
    assert "BASE_IMAGE=other:1" in said
    for name, h in versions().harnesses.items():
        assert f"--label polar.harness.{name}={h.version}" in said and f"opt/polar/{name}/bundle.json" in said
    assert (mine / "main.py").read_text() == bundles.here() and bundles.is_current(
        mine, "mini_swe_agent", bundles.here()
    )
    assert (root / "python3.99/mini_swe_agent/main.py").read_text() == "3.99"
    assert not list(root.glob(".context-*"))
    # What is current isn't built again; on another base, or by force, it is.
    for changed, more, times in (("", [], 1), ('[{"Id": "y"}]', [], 2), ("", [], 2), ("", ["--force"], 3)):
        if changed:
            (docker.parent / "other:1").write_text(changed)
        assert CliRunner().invoke(images.app, [*build, *more]).exit_code == 0
        assert (docker.parent / "said").read_text().count("build -q") == times


def test_a_base_without_python_is_said_so(tmp_path, monkeypatch):
    docker = script(tmp_path, "programs/docker", "#!/bin/sh\necho python3: not found >&2; exit 127\n")
    monkeypatch.setenv("PATH", f"{docker.parent}:/usr/bin:/bin")
    result = CliRunner().invoke(images.app, ["build", "mini_swe_agent", "--to", str(tmp_path), "--base", "bare:1"])
    assert isinstance(result.exception, bundles.BundleError)
    assert "bare:1 has no Python" in result.exception.message and "not found" in result.exception.message
