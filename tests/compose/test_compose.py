"""The compose file and its settings, checked without starting anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from polar.config import load
from tests.compose.deployment import ROOT, SECRETS, deployment
from workers.__main__ import STAGES

COMPOSE = ROOT / "compose"
FILE = COMPOSE / "docker-compose.yml"
TEXT = FILE.read_text()
DOC: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = DOC["services"]
WORKERS = {"init", "run", "postrun"}
REFERENCE = re.compile(r"\$\{(\w+)(?:(:?[-?])([^}]*))?\}")


def test_every_stage_is_a_service_and_names_its_role() -> None:
    assert set(STAGES) <= set(SERVICES)
    for name, service in SERVICES.items():
        assert service["command"][0] == name and name in deployment.ROLES


def test_every_service_is_supervised_checked_and_confined() -> None:
    for name, service in SERVICES.items():
        assert service["restart"] == "always", name
        assert service["healthcheck"]["test"][-2:] == ["health", name]
        assert service["cap_drop"] == ["ALL"] and service["read_only"] and service["init"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not service.get("privileged") and "pid" not in service and "network_mode" not in service, name


def test_start_order_waits_for_health() -> None:
    for name, service in SERVICES.items():
        needs = service.get("depends_on", {})
        assert all(v == {"condition": "service_healthy"} for v in needs.values()), name
        if name in STAGES or name == "api":
            assert {"redis", "s3"} <= set(needs), name
    assert {"redis", "engine"} <= set(SERVICES["proxy"]["depends_on"])


def test_secrets_come_from_the_environment_and_their_absence_is_an_error() -> None:
    seen = set()
    for name, service in SERVICES.items():
        for key, value in service["environment"].items():
            if re.search(r"(PASSWORD|SECRET|TOKEN|KEY)(_|$)", key):
                m = REFERENCE.fullmatch(str(value))
                assert m and m[2] == ":?" and m[1] in m[3], f"{name}.{key}: {value}"
                seen.add(m[1])
    assert seen == set(SECRETS)
    # Nor are they given a value anywhere else.
    for name, operator, _ in REFERENCE.findall(TEXT):
        assert operator == ":?" if name in seen else operator in (":-", "-"), name


def test_each_service_has_only_the_secrets_that_it_needs() -> None:
    def who(key: str) -> set[str]:
        return {n for n, s in SERVICES.items() if key in s["environment"]}

    # The proxy has a secret of its own under that name: sandboxes talk to it.
    assert who("POLAR_API_TOKEN") == {"api", "proxy"}
    assert SERVICES["proxy"]["environment"]["POLAR_API_TOKEN"].startswith("${POLAR_PROXY_TOKEN")
    assert who("POLAR_ENGINE_API_KEY") == {"engine", "proxy"}
    assert "proxy" not in who("AWS_SECRET_ACCESS_KEY")
    assert "engine" not in who("REDIS_PASSWORD") | who("AWS_SECRET_ACCESS_KEY")


def test_the_example_lists_every_variable_and_holds_no_secret() -> None:
    lines = [x.lstrip("#") for x in (COMPOSE / ".env.example").read_text().splitlines()]
    listed = dict(x.split("=", 1) for x in lines if re.match(r"[A-Z][A-Z0-9_]*=", x))
    used = {name for name, _, _ in REFERENCE.findall(TEXT)}
    toml = re.sub(r"^#.*$", "", (COMPOSE / "polar.toml").read_text(), flags=re.M)
    used |= {name for name, _, _ in REFERENCE.findall(toml)}
    assert used == set(listed) - {"COMPOSE_PROJECT_NAME"}
    assert all(listed[s] == "" for s in SECRETS)


def test_who_reads_the_settings_template_has_all_its_variables() -> None:
    toml = re.sub(r"^#.*$", "", (COMPOSE / "polar.toml").read_text(), flags=re.M)
    used = {name for name, _, _ in REFERENCE.findall(toml)}
    readers = {n for n, s in SERVICES.items() if any("polar.toml" in v for v in s.get("volumes", []))}
    assert readers == {"proxy", "api", *STAGES}
    for name in readers:
        assert used <= set(SERVICES[name]["environment"]), name


def test_only_workers_hold_the_docker_socket() -> None:
    holders = {n for n, s in SERVICES.items() if any("/var/run/docker.sock" in v for v in s.get("volumes", []))}
    assert holders == WORKERS
    # A task's commands must not run in a container that holds it.
    dockerfile = (COMPOSE / "Dockerfile").read_text()
    assert re.search(r"rm /src/runtimes/local\.py", dockerfile)
    assert 'default_runtime = "docker"' in (COMPOSE / "polar.toml").read_text()


def test_networks_keep_apart_who_has_no_business_together() -> None:
    def on(network: str) -> set[str]:
        return {n for n, s in SERVICES.items() if network in s["networks"]}

    assert on("model") == {"engine", "proxy"}
    assert on("sandbox") == {"proxy"}
    assert on("control") == {"api"}
    assert on("objects") == {"s3", "api", *STAGES}
    assert set().union(*(s["networks"] for s in SERVICES.values())) == set(DOC["networks"])


def test_ports_are_for_this_machine_unless_told_otherwise() -> None:
    for service in SERVICES.values():
        for port in service.get("ports", []):
            assert re.match(r"\$\{\w+:-127\.0\.0\.1\}:", port), port


def test_the_proxys_socket_has_one_path_inside_and_outside() -> None:
    mount = next(v for v in SERVICES["proxy"]["volumes"] if "POLAR_RUN_DIR" in v)
    assert mount == "${POLAR_RUN_DIR:-/run/polar}:${POLAR_RUN_DIR:-/run/polar}"
    for name in (*WORKERS, "proxy", "api"):
        assert SERVICES[name]["environment"]["POLAR_RUN_DIR"] == "${POLAR_RUN_DIR:-/run/polar}"


def test_all_workers_of_a_machine_are_one_node() -> None:
    assert {SERVICES[n]["environment"]["POLAR_NODE"] for n in WORKERS} == {"${POLAR_NODE:-compose}"}
    # A fixed name or port would forbid --scale.
    assert not any("container_name" in SERVICES[n] or "ports" in SERVICES[n] for n in WORKERS)


def test_images_are_built_from_a_base_of_ones_choice() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE_IMAGE=", text, re.M)
    froms = re.findall(r"^FROM (\S+) AS (\S+)", text, re.M)
    stages = {name for _, name in froms}
    assert all(source == "${BASE_IMAGE}" or source in stages for source, _ in froms)
    built = {s["image"]: s["build"] for s in SERVICES.values() if "build" in s}
    assert {s["image"] for s in SERVICES.values()} == set(built)
    for build in built.values():
        m = REFERENCE.search(build["target"])
        assert (m[3] if m else build["target"]) in stages
        assert "BASE_IMAGE" in build["args"]


def test_the_build_context_has_every_room() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = {p.split(".")[0] for p in project["tool"]["setuptools"]["packages"]}
    kept = {x[1:] for x in (COMPOSE / "Dockerfile.dockerignore").read_text().splitlines() if x.startswith("!")}
    assert rooms <= kept
    assert {p for p in kept if not (ROOT / p).exists()} <= {"constraints.txt"}


def test_settings_template_is_valid_for_bundled_and_for_foreign_servers(tmp_path: Path) -> None:
    template = (COMPOSE / "polar.toml").read_text()
    path = tmp_path / "polar.toml"
    base = {"POLAR_RUN_DIR": "/run/polar", "REDIS_PASSWORD": "correct-horse"}
    path.write_text(deployment.render(template, deployment.environment(base)))
    s = load(path, env={})
    assert s.broker == "redis://:correct-horse@redis:6379/0" and s.proxy_socket == "/run/polar/proxy/sock"
    assert s.model("policy")[1].engine == "http://engine:30000"
    foreign = base | {"BROKER_URL": "rediss://u:p@r:1/2", "OBJECTS_URL": "s3://b", "ENGINE_URL": "http://e:1"}
    path.write_text(deployment.render(template, deployment.environment(foreign | {"MODEL_CONTEXT_LENGTH": "99"})))
    s = load(path, env={})
    assert (s.broker, s.objects, s.model("policy")[1].context_length) == ("rediss://u:p@r:1/2", "s3://b", 99)


def _compose() -> list[str] | None:
    for argv in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(argv[0]) and subprocess.run([*argv, "version"], capture_output=True).returncode == 0:
            return argv
    return None


def test_compose_takes_the_file_and_names_a_missing_secret(tmp_path: Path) -> None:
    argv = _compose()
    if argv is None:
        pytest.skip("neither 'docker compose' nor docker-compose is installed")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    values = {name: "correct-horse" for name in SECRETS}

    def config(given: dict[str, str]) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "env"
        file.write_text("".join(f"{k}={v}\n" for k, v in given.items()))
        words = [*argv, "--env-file", str(file), "-f", str(FILE), "config"]
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)

    done = config(values)
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(SERVICES)
    for name in SECRETS:
        done = config({k: v for k, v in values.items() if k != name})
        assert done.returncode != 0 and name in done.stderr
