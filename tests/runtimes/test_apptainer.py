"""What is special about `apptainer`: where images come from, their cache, who owns what, and what is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polar.config import Settings
from polar.errors import InfraError, UnsupportedSpec
from polar.task import RuntimeSpec
from runtimes import apptainer_cli, apptainer_source, cgroups
from runtimes.apptainer import ApptainerRuntime
from runtimes.apptainer_images import LIMIT_VARIABLE
from runtimes.apptainer_source import Source
from tests.runtimes import small_image
from tests.runtimes.conftest import apptainer_base, apptainer_folder, apptainer_image


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    folder = apptainer_folder()
    yield Settings(data_dir=str(folder / "data"), volume_roots=[str(folder)])
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def runtime(settings) -> Iterator[ApptainerRuntime]:
    Path(settings.data_dir).mkdir()
    apptainer_image(settings)
    made = ApptainerRuntime(settings)
    yield made
    for ref in made.list({}):
        made.attach(ref).destroy()


def create(runtime, **fields):
    return runtime.create(RuntimeSpec(**{"image": "base", **fields}), labels={"t": "1"}, proxy=None, timeout=120)


@pytest.fixture(scope="module")
def archive(settings) -> Path:
    path = Path(settings.volume_roots[0], "small.tar")
    small_image.save(small_image.build(apptainer_base()), path)
    return path


def test_an_archive_is_unpacked_once(runtime, archive):
    image = f"docker-archive:{archive}"
    # Several at once, in a cache that has it not: one unpacks, the others wait for it.
    with ThreadPoolExecutor(3) as pool:
        boxes = list(pool.map(lambda _: create(runtime, image=image), range(3)))
    images = list((runtime.root / "cache" / "images").iterdir())
    assert len(images) == 1 and not images[0].name.startswith(".")
    r = boxes[0].exec("echo $GREETING; pwd; id -u", timeout=30)
    owner = apptainer_cli.need().owner
    assert r.output.decode().splitlines() == ["hello there", "/made/here", str(owner[0] if owner else os.getuid())]
    boxes[0].write("/bin/sh", b"overwritten")
    assert boxes[1].exec("echo fine", timeout=30).output == b"fine\n"
    for box in boxes:
        box.destroy()


def test_the_cache_is_bounded_and_spares_what_is_used(runtime, archive, monkeypatch):
    image, cache = f"docker-archive:{archive}", runtime.root / "cache" / "images"
    box = create(runtime, image=image)
    (old,) = cache.iterdir()
    other = archive.with_name("other.tar")
    small_image.save(small_image.build(apptainer_base()), other, "other:latest")
    monkeypatch.setenv(LIMIT_VARIABLE, "0.000001")
    create(runtime, image=f"docker-archive:{other}").destroy()
    assert old in set(cache.iterdir()) and len(list(cache.iterdir())) == 2
    box.destroy()
    runtime.images.shrink()
    assert old not in set(cache.iterdir())


def test_a_killed_builder_s_rest_is_removed(runtime, archive):
    key = apptainer_source.digest(Source("docker-archive", str(archive)))
    runtime._prepare(apptainer_cli.need())
    images = runtime.root / "cache" / "images"
    shutil.rmtree(images / key, ignore_errors=True)
    (images / f".new-{key}" / "rootfs" / "half").mkdir(parents=True)
    create(runtime, image=f"docker-archive:{archive}").destroy()
    assert not list(images.glob(".new-*"))


def test_missing_images(runtime, settings):
    for image in (
        "no-such-image:1",
        f"docker-archive:{settings.volume_roots[0]}/none.tar",
        f"{settings.volume_roots[0]}/none.sif",
    ):
        with pytest.raises(InfraError) as e:
            create(runtime, image=image)
        assert (e.value.code, e.value.retryable) == ("image_missing", False), image
    with pytest.raises(InfraError) as e:  # a registry that doesn't answer may do so later
        create(runtime, image="docker://127.0.0.1:1/no/such:image")
    assert (e.value.code, e.value.retryable) == ("runtime_create_failed", True)
    assert runtime.list({}) == [] and list(runtime.boxes.iterdir()) == []


def test_a_private_registry(runtime, monkeypatch):
    monkeypatch.setenv("APPTAINER_NOHTTPS", "true")
    with small_image.Registry(small_image.build(apptainer_base())) as registry:
        image = f"docker://{registry.host}/private/small:1"
        with pytest.raises(InfraError) as e:
            create(runtime, image=image, options={"pull": "never"})
        assert e.value.code == "image_missing" and registry.seen == []
        with pytest.raises(InfraError) as e:
            create(runtime, image=image)
        assert (e.value.code, e.value.retryable) == ("image_missing", False)
        monkeypatch.setenv("APPTAINER_DOCKER_USERNAME", registry.account[0])
        monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", registry.account[1])
        box = create(runtime, image=image)
        assert box.exec("echo $GREETING", timeout=30).output == b"hello there\n"
        asked = len(registry.seen)
        create(runtime, image=image).destroy()
        assert len(registry.seen) == asked
        create(runtime, image=image, options={"pull": "always"}).destroy()
        assert len(registry.seen) > asked
        with pytest.raises(InfraError) as e:
            create(runtime, image=f"docker://{registry.host}/private/other:1")
        assert e.value.code == "image_missing"
        registry.shutdown()
    monkeypatch.delenv("APPTAINER_DOCKER_PASSWORD")
    create(runtime, image=image).destroy()  # what is here is not asked for
    box.destroy()


def test_a_broken_archive(runtime, settings):
    path = Path(settings.volume_roots[0], "broken.tar")
    path.write_bytes(b"no archive at all")
    with pytest.raises(InfraError) as e:
        create(runtime, image=f"docker-archive:{path}")
    assert (e.value.code, e.value.retryable) == ("image_missing", False)


@pytest.mark.parametrize(
    "image",
    ["/", "/etc", "docker-archive:/etc/passwd", "../x", "docker://$(id)", "shub://x", "docker-daemon:x:y", "-x", "a b"],
)
def test_images_that_are_refused(runtime, image):
    with pytest.raises(UnsupportedSpec, match=r"runtime\.image"):
        runtime.check(RuntimeSpec(image=image))


def test_names_on_the_shelf(tmp_path):
    (tmp_path / "python_3.12.sif").touch()
    (tmp_path / "org_tool_v1").mkdir()
    parse = lambda image: apptainer_source.parse(image, tmp_path, [])  # noqa: E731
    assert parse("python:3.12") == Source("sif", str(tmp_path / "python_3.12.sif"))
    assert parse("org/tool:v1") == Source("folder", str(tmp_path / "org_tool_v1"))
    assert parse("other:1") == Source("remote", "docker://other:1")
    digest = "a" * 64
    assert apptainer_source.digest(parse(f"docker://x/y@sha256:{digest}")) == digest
    assert apptainer_source.digest(parse("docker://x/y:1")) is None


def test_a_link_on_the_way_out_of_the_roots(tmp_path):
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "x").symlink_to("/etc")
    with pytest.raises(UnsupportedSpec):
        apptainer_source.parse(str(tmp_path / "shelf" / "x" / "ssl"), tmp_path / "shelf", [])


def test_root_inside_is_nobody_outside(runtime):
    box = create(runtime, user="root")
    r = box.exec("id -u; touch mine /usr/new; stat -c %u mine; grep CapEff /proc/self/status", timeout=30)
    assert r.output.decode().split() == ["0", "0", "CapEff:", "0" * 16]
    upper = runtime.boxes / box.ref.handle / "overlay" / "upper"
    owner = apptainer_cli.need().owner
    assert (upper / "usr/new").stat().st_uid == (owner[0] if owner else os.getuid())
    box.write("up", b"x")
    assert box.exec("stat -c %u up; kill -9 -1; true", timeout=30).output.startswith(b"0")
    box.destroy()
    assert not upper.exists()


def test_no_files_of_the_host_s(runtime, settings):
    box = create(runtime)
    r = box.exec(
        f"ls {settings.data_dir} /work /home /var/tmp; cat /etc/shadow; cat /proc/1/environ | tr '\\0' '\\n'",
        timeout=30,
    )
    assert b"records" not in r.output and b"root:$" not in r.output
    box.destroy()


def test_the_environment_is_the_image_s_and_the_task_s(runtime, monkeypatch):
    monkeypatch.setenv("APPTAINERENV_LEAK", "the-worker-s")
    box = create(runtime, env={"SPEC": "1"})
    env = dict(line.split("=", 1) for line in box.exec("env", timeout=30).output.decode().splitlines())
    assert env["SPEC"] == "1" and env["HOME"] == "/root" and "/usr/bin" in env["PATH"]
    assert not [k for k in env if k.startswith(("APPTAINER", "SINGULARITY", "LD_"))] and "LEAK" not in env
    box.destroy()


def test_a_dead_instance_is_started_anew(runtime):
    """A node that was restarted, or the kernel out of memory: the files are still there."""
    box = create(runtime)
    box.exec("echo kept >f", timeout=30)
    first = box._first()
    os.kill(first.pid, 9)
    assert box.exec("cat f", timeout=30).output == b"kept\n"
    assert box._first().pid != first.pid
    box.destroy()


def test_a_folder_that_the_owner_can_t_get_into(tmp_path):
    if apptainer_cli.need().owner is None:
        pytest.skip("the worker is the owner")
    (tmp_path / "private").mkdir(mode=0o700)
    shelf = tmp_path / "private" / "data" / "apptainer" / "shelf"
    shelf.mkdir(parents=True)
    (shelf / "base").symlink_to(apptainer_base())
    runtime = ApptainerRuntime(Settings(data_dir=str(tmp_path / "private" / "data")))
    with pytest.raises(InfraError, match="can't get into") as e:
        create(runtime)
    assert e.value.code == "runtime_create_failed" and not e.value.retryable


def test_without_control_groups_limits_are_refused_at_submission(runtime, monkeypatch):
    monkeypatch.setattr(cgroups, "find", lambda: "none were delegated")
    with pytest.raises(UnsupportedSpec, match=r"runtime\.memory_mb.*none were delegated"):
        runtime.check(RuntimeSpec(image="base", memory_mb=100))
    runtime.check(RuntimeSpec(image="base", pids=100))
    box = create(runtime, pids=20)  # kept by the user namespace's own limit
    r = box.exec(
        "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24; do sleep 3 & done; wait", timeout=60
    )
    assert b"fork" in r.output.lower()
    box.destroy()


def test_where_there_is_no_apptainer(monkeypatch, tmp_path):
    monkeypatch.setattr(apptainer_cli, "find", lambda: "apptainer is not installed")
    runtime = ApptainerRuntime(Settings(data_dir=str(tmp_path)))
    assert runtime.available() == (False, "apptainer is not installed")
    runtime.check(RuntimeSpec(image="x", memory_mb=100))  # another node may have it
    with pytest.raises(InfraError, match="not installed") as e:
        create(runtime)
    assert (e.value.code, e.value.retryable) == ("runtime_create_failed", False)
