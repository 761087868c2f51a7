"""What the back-ends that pass GPUs on ask for; no GPU is needed for that."""

from __future__ import annotations

import docker
import pytest

from polar.config import Settings
from polar.sandbox import SandboxRef
from polar.task import RuntimeSpec
from runtimes import docker_config
from runtimes.apptainer import ApptainerRuntime
from runtimes.apptainer_sandbox import ApptainerSandbox, Record


@pytest.mark.parametrize("gpus", [0, 1, 3])
def test_what_the_docker_engine_is_asked_for(gpus):
    spec, ref = RuntimeSpec(image="x", gpus=gpus), SandboxRef(backend="docker", handle="h", proxy_url="", workdir="/w")
    asked = docker_config.container(docker.APIClient(version="1.41"), spec, ref, {}, None, None, None)
    wanted = [{"Driver": "", "Count": gpus, "DeviceIDs": [], "Capabilities": [["gpu"]], "Options": {}}]
    assert (asked["HostConfig"].get("DeviceRequests") or []) == (wanted if gpus else [])


@pytest.mark.parametrize("gpus", [False, True])
def test_what_apptainer_is_asked_for(tmp_path, gpus):
    place = ApptainerRuntime(Settings(data_dir=str(tmp_path)))
    ref = SandboxRef(backend="apptainer", handle="h", proxy_url="", workdir="/w")
    arguments = ApptainerSandbox(place, Record(ref=ref, gpus=gpus))._arguments()
    assert ("--nv" in arguments) == gpus
