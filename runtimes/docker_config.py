"""How a sandbox's container is asked for: what it may use, see and do."""

from __future__ import annotations

import os
from typing import Any

from docker.types import DeviceRequest, Mount, Ulimit

from polar.codec import to_json
from polar.sandbox import ProxyEndpoint, SandboxRef
from polar.task import RuntimeSpec
from runtimes import docker_bridge

DEFAULT_MEMORY_MB = 4096
DEFAULT_PIDS = 512
LABEL_REF = "polar.ref"  # the whole reference: what is found by its labels can be attached to


def container(
    api: Any,
    spec: RuntimeSpec,
    ref: SandboxRef,
    labels: dict[str, str],
    proxy: ProxyEndpoint | None,
    bridge: str | None,
    system_calls: str | None,
) -> dict[str, Any]:
    mounts = [Mount(v.target, v.source, type="bind", read_only=True) for v in spec.volumes]
    if bridge == docker_bridge.RELAY and proxy and proxy.socket:
        # The folder, not the socket: a proxy that starts anew makes a new socket.
        folder = os.path.dirname(os.path.abspath(proxy.socket))
        mounts.append(Mount(docker_bridge.MOUNT, folder, type="bind", read_only=True))
    memory = (spec.memory_mb or DEFAULT_MEMORY_MB) << 20
    host = api.create_host_config(
        init=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true", *([f"seccomp={system_calls}"] if system_calls else [])],
        network_mode="bridge" if spec.network == "internet" else "none",
        ipc_mode="private",
        mem_limit=memory,
        memswap_limit=memory,
        pids_limit=spec.pids or DEFAULT_PIDS,
        nano_cpus=int(spec.cpus * 1e9) if spec.cpus else None,
        device_requests=[DeviceRequest(count=spec.gpus, capabilities=[["gpu"]])] if spec.gpus else None,
        ulimits=_ulimits(spec),
        oom_score_adj=500,  # before the worker
        mounts=mounts,
        log_config={"type": "none", "config": {}},
    )
    return api.create_container_config(
        spec.image,
        # Root's process, without capabilities: an agent that isn't root can't end it.
        ["infinity"],
        entrypoint=["sleep"],
        user="0:0",
        working_dir=ref.workdir,
        environment=spec.env,
        labels={**labels, LABEL_REF: to_json(ref).decode()},
        host_config=host,
        healthcheck={"test": ["NONE"]},
    )


def _ulimits(spec: RuntimeSpec) -> list[Ulimit]:
    wanted = {"core": 0, "nofile": spec.open_files, "fsize": spec.disk_mb << 20 if spec.disk_mb else None}
    return [Ulimit(name=name, soft=n, hard=n) for name, n in wanted.items() if n is not None]
