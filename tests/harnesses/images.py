"""The sandbox images with CLIs in them: `polar images build` makes those that are missing or old."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from typer.testing import CliRunner

from cli import images
from tests.harnesses.deployment import bundles

BASE = f"{images.TAG}:base"


def has_image(image: str) -> bool:
    docker = shutil.which("docker")
    return bool(docker) and not subprocess.run([docker, "image", "inspect", image], capture_output=True).returncode


def built(name: str) -> str:
    """The image of a harness, or of `all`."""
    if (root := bundles()) is None:
        pytest.skip("POLAR_HARNESSES (folder made by `polar images bundle`), which images are made of, is not set")
    result = CliRunner().invoke(images.app, ["build", name, "--to", str(root)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output.strip()
