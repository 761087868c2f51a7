"""images list, bundle, build: the agent CLIs at their pinned versions, as folders to mount and as sandbox images."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import bundles
from cli.common import BAD, complain, out, print_json
from harness_adapters.versions import versions
from polar.errors import InvalidConfig

app = typer.Typer(no_args_is_help=True)
Names = Annotated[list[str] | None, typer.Argument(help="Harnesses (default: all).", show_default=False)]
Folder = Annotated[Path, typer.Option("--to", envvar="POLAR_HARNESSES", help="Where the bundles are.")]
Force = Annotated[bool, typer.Option("--force", help="Make it anew though it is current.")]
DOCKERFILE = Path(__file__).parents[1] / "compose" / "images" / "Dockerfile.harness"
DEFAULT = Path("/opt/polar")
TAG = "polar-sandbox"


@app.command("list")
def list_(to: Folder = DEFAULT, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """The harnesses that have a package, their versions, and whether there is a current bundle."""
    rows = []
    for name, h in versions().harnesses.items():
        state = "current" if _current(to, name) else "old" if (to / name).is_dir() else "none"
        rows.append({"harness": name, "package": h.npm or h.pypi, "version": h.version, "bundle": state})
    if as_json:
        return print_json(rows)
    for r in rows:
        out.print(f"{r['harness']:16} {r['package']}@{r['version']}  bundle: {r['bundle']}", soft_wrap=True)
    return None


@app.command()
def bundle(
    names: Names = None,
    to: Folder = DEFAULT,
    python: Annotated[
        str, typer.Option(help="Python of the images that will use it, e.g. 3.12 (default: this one).")
    ] = "",
    force: Force = False,
) -> None:
    """Make folders with a CLI and all it needs, to be mounted read-only at /opt/polar/<harness> in any image."""
    failed = []
    for name in bundles.known(names or []):
        try:
            out.print(str(bundles.build(name, to.absolute(), python=python, force=force)), soft_wrap=True)
        except bundles.BundleError as e:
            failed.append(name)
            complain(f"{name}: {e.message}")
    if failed:
        raise typer.Exit(BAD)


@app.command()
def build(
    names: Annotated[list[str] | None, typer.Argument(help="Harnesses, or 'all' for one image with every one.")] = None,
    base: Annotated[str, typer.Option(help="Image to build on.")] = f"{TAG}:base",
    tag: Annotated[str, typer.Option(help="Name of the image (default: polar-sandbox:<harness>).")] = "",
    to: Folder = DEFAULT,
    force: Force = False,
) -> None:
    """Build one sandbox image per harness, or with 'all' one that has them all; an image that is current stays."""
    wanted = names or ["all"]
    if "all" in wanted and len(wanted) > 1:
        raise InvalidConfig("'all' is an image of its own: give it alone")
    if tag and len(wanted) > 1:
        raise InvalidConfig(f"--tag: one name for {len(wanted)} images")
    if not DOCKERFILE.is_file():
        raise InvalidConfig(
            f"{DOCKERFILE} is missing: images are built in a checkout of Polar; bundles can be made anywhere"
        )
    docker = shutil.which("docker")
    if docker is None:
        raise InvalidConfig("the docker client is not installed")
    for name in wanted:
        members = bundles.known([] if name == "all" else [name])
        image = tag or f"{TAG}:{name}"
        _image(docker, image, base, members, to.absolute(), force)
        out.print(image)


def _image(docker: str, image: str, base: str, members: list[str], root: Path, force: bool) -> None:
    python = _python_of(docker, base) if any(versions().harnesses[m].pypi for m in members) else ""
    labels = {f"polar.harness.{m}": versions().harnesses[m].version for m in members}
    labels["polar.made-of"] = _made_of(_inspect(docker, base).get("Id", ""), members, python)
    if not force and labels.items() <= _labels(_inspect(docker, image)).items():
        return
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".context-", dir=root) as folder:
        for name in members:
            # A bundle for another Python than this one's must not take the place of the one that is mounted from here.
            foreign = versions().harnesses[name].pypi and python != bundles.here()
            made = bundles.build(name, root / f"python{python}" if foreign else root, python=python, force=force)
            # Links, not copies: the context is only read.
            shutil.copytree(made, Path(folder) / "opt/polar" / name, symlinks=True, copy_function=os.link)
        argv = [docker, "build", "-q", "-f", str(DOCKERFILE), "-t", image, "--build-arg", f"BASE_IMAGE={base}"]
        argv += [word for k, v in labels.items() for word in ("--label", f"{k}={v}")]
        done = subprocess.run([*argv, folder], capture_output=True, text=True)
    if done.returncode:
        raise bundles.BundleError(f"docker build of {image} failed: {done.stderr.strip()[-1500:]}")


def _made_of(base: str, members: list[str], python: str) -> str:
    """What tells an image that is current from one that has to be made anew."""
    parts = [base, DOCKERFILE.read_text(), *(bundles.wanted(m, python) for m in members)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _inspect(docker: str, image: str) -> dict[str, Any]:
    """What the engine knows of an image; nothing if it isn't there."""
    done = subprocess.run([docker, "image", "inspect", image], capture_output=True, text=True)
    return json.loads(done.stdout)[0] if done.returncode == 0 else {}


def _labels(inspected: dict[str, Any]) -> dict[str, str]:
    return (inspected.get("Config") or {}).get("Labels") or {}


def _python_of(docker: str, image: str) -> str:
    """The minor version of the image's Python: compiled packages must fit it."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    argv = [docker, "run", "--rm", "--network", "none", "--entrypoint", "python3", image, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise bundles.BundleError(f"{image} has no Python, which mini_swe_agent needs: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


def _current(root: Path, name: str) -> bool:
    return bundles.is_current(root / name, name, bundles.here())
