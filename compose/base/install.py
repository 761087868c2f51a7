#!/usr/bin/env python3
"""pip inside an image build, with what extra/ beside this file holds: ca.crt and wheels/, both optional.

    install.py [--no-deps] REQUIREMENT…      install these
    install.py --extras proxy,workers        what pyproject.toml names for these extras, without the project
    install.py --wheel FOLDER                 a wheel of the project itself

The pins of constraints.txt hold where there is one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

EXTRA = Path(__file__).parent / "extra"
SOURCE = Path("/src")
PYTHON = "/opt/polar/bin/python"


def requirements(project: dict, extras: list[str]) -> list[str]:
    """The project's own dependencies and those of `extras`. SystemExit for an extra that it doesn't have."""
    known = project["optional-dependencies"]
    if unknown := [e for e in extras if e not in known]:
        sys.exit(f"--extras: found {', '.join(unknown)}, allowed are {', '.join(sorted(known))}")
    return [*project["dependencies"], *(r for e in extras for r in known[e])]


def environment() -> dict[str, str]:
    # An empty variable is not the same as none: pip would take it for an address.
    env = {k: v for k, v in os.environ.items() if not (k.startswith("PIP_") and not v)}
    ca, wheels = EXTRA / "ca.crt", EXTRA / "wheels"
    if ca.is_file():
        env |= {"PIP_CERT": str(ca), "SSL_CERT_FILE": str(ca), "REQUESTS_CA_BUNDLE": str(ca)}
    if wheels.is_dir():
        env["PIP_FIND_LINKS"] = str(wheels)
    return env


def constraints(env: dict[str, str], folder: Path) -> list[str]:
    """The pins, less those of packages for which wheels/ has a version of its own."""
    path = SOURCE / "constraints.txt"
    if not path.is_file():
        return []
    own = {_name(w.name.split("-")[0]) for w in Path(env.get("PIP_FIND_LINKS", "/nowhere")).glob("*.whl")}
    kept = [x for x in path.read_text().splitlines() if _name(re.split(r"[=<>~!;\[ ]", x)[0]) not in own]
    target = folder / "constraints.txt"
    target.write_text("\n".join(kept) + "\n")
    return ["-c", str(target)]


def _name(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def main(args: list[str]) -> int:
    env, scratch, command = environment(), Path("/tmp"), ["install", "--progress-bar=off"]
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    match args:
        case ["--extras", names]:
            words = requirements(project, names.split(","))
        case ["--wheel", folder]:
            command, words = ["wheel", "-w", folder], ["--no-deps", str(SOURCE)]
        case _:
            words = args
    pins = constraints(env, scratch) if words[:1] != ["--no-deps"] else []
    argv = [PYTHON, "-m", "pip", *command, "--no-cache-dir", "--disable-pip-version-check", "-q"]
    try:
        return subprocess.run([*argv, *pins, *words], env=env, check=False).returncode
    finally:
        (scratch / "constraints.txt").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
