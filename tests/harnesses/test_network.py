"""The watch sees what a sandbox asks the world: else "no foreign hosts" would be said of a watch that sees nothing."""

from __future__ import annotations

import os
import subprocess
import time
import uuid

import pytest

from polar.task import AgentSpec, RuntimeSpec, TaskRequest
from runtimes import bwrap
from tests.harnesses import network
from tests.harnesses.network import WAIT, Finder, Watch
from tests.workers.cluster import Cluster

ASK = """
import socket
try:
    socket.getaddrinfo("telemetry.example.org", 443)
except OSError:
    pass
for family, host in ((socket.AF_INET, "192.0.2.7"), (socket.AF_INET6, "2001:db8::7")):
    with socket.socket(family) as s:
        s.settimeout(2)
        try:
            s.connect((host, 443))
        except OSError:
            pass
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.sendto(b"x", ("192.0.2.9", 123))
with socket.socket() as s:
    s.connect_ex(("127.0.0.1", 9))
"""


def test_names_connections_and_datagrams_are_seen(tmp_path):
    if why := network.available():
        pytest.skip(why)
    if isinstance(found := bwrap.find(), str):
        pytest.skip(f"no working bubblewrap: {found}")
    task_id = f"t-{uuid.uuid4().hex[:12]}"
    task = TaskRequest(
        task_id=task_id,
        instruction="none",
        agent=AgentSpec(harness="shell", command=WAIT.partition("\n")[2] % 'python3 -c "$ASK"', env={"ASK": ASK}),
        runtime=RuntimeSpec(backend="local", options={"isolation": "bwrap"}),
    )
    with Cluster(tmp_path / "c") as cluster:
        cluster.workers(slots=1)
        with Watch(Finder(f"{task_id}.s0", cluster.folder)) as watch:
            (result,) = cluster.wait(cluster.submit(task), 100)
    assert result.termination == "finished" and not watch.error, (result.agent, watch.error)
    foreign = {"telemetry.example.org", "192.0.2.7:443", "192.0.2.9:123/udp"}
    assert watch.networks and foreign <= watch.foreign, watch.foreign
    assert watch.foreign - foreign <= {"[2001:db8::7]:443", "2001:db8::7:443"}  # where the machine has IPv6


def test_a_network_that_isnt_up_yet_is_watched():
    if why := network.available():
        pytest.skip(why)
    sleeper = subprocess.Popen(["unshare", "--net", "sleep", "60"])
    try:
        space = f"/proc/{sleeper.pid}/ns/net"
        _until(lambda: os.readlink(space) != os.readlink("/proc/self/ns/net"))
        found = [sleeper.pid]
        with Watch(lambda: found.pop() if found else None) as watch:
            _until(lambda: watch.networks or watch.error)
        assert watch.networks == 1 and not watch.error, watch.error
    finally:
        sleeper.kill()
        sleeper.wait()


def _until(true) -> None:
    end = time.monotonic() + 20
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
