"""Which specs get equal sandboxes, and how many are kept of which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from polar.sandbox import ProxyEndpoint
from polar.task import Exec, RuntimeSpec, Volume
from runtimes.warm_shape import AGAIN, shares, wish

PROXY = ProxyEndpoint(url="http://127.0.0.1:1", socket="/s")
# Every field of a spec is here: a new one must say what it means for a sandbox that is made in advance.
APART = {"backend": "docker", "prepare": [Exec(command="true")], "evaluation_prepare": []}
NEVER = {"env": {"TOKEN": "secret"}, "gpus": 1}
SHAPING = {
    "image": "b", "workdir": "/b", "cpus": 2.0, "memory_mb": 64, "pids": 9, "disk_mb": 9, "open_files": 9, "user": "1:1",
    "network": "none", "volumes": [Volume(source="/usr", target="/v")], "options": {"pull": "missing"},
}  # fmt: skip


def key(spec: RuntimeSpec, proxy: ProxyEndpoint | None = PROXY) -> str | None:
    found = wish(spec, proxy)
    return found.key if found else None


def test_every_field_of_a_spec_is_sorted_in():
    assert {f.name for f in structs.fields(RuntimeSpec)} == {*APART, *NEVER, *SHAPING}


@pytest.mark.parametrize("name", APART)
def test_what_comes_later_makes_no_difference_and_is_left_out(name):
    spec = RuntimeSpec(image="a", **{name: APART[name]})
    assert key(spec) == key(RuntimeSpec(image="a")) is not None
    made = wish(spec, PROXY).spec
    assert made.prepare == [] and made.evaluation_prepare is None and made.env == {}


@pytest.mark.parametrize("name", NEVER)
def test_what_is_a_task_s_own_is_never_kept(name):
    assert key(RuntimeSpec(image="a", **{name: NEVER[name]})) is None


@pytest.mark.parametrize("options", [{"pull": "always"}, {"cache_prepare": True}])
def test_images_that_change_or_are_kept_prepared_are_not_kept(options):
    assert key(RuntimeSpec(image="a", options=options)) is None


@pytest.mark.parametrize("name", SHAPING)
def test_everything_else_must_be_equal(name):
    other = RuntimeSpec(**{"image": "a", name: SHAPING[name]})
    assert key(other) not in (None, key(RuntimeSpec(image="a")))
    assert key(other) == key(structs.replace(other))


def test_the_proxy_must_be_equal():
    spec = RuntimeSpec(image="a")
    others = [None, ProxyEndpoint(url=PROXY.url), ProxyEndpoint(url="http://127.0.0.1:2", socket="/s")]
    assert len({key(spec, p) for p in (PROXY, *others)}) == 4


def test_options_are_equal_in_any_order():
    a, b = {"isolation": "bwrap", "seccomp": True}, {"seccomp": True, "isolation": "bwrap"}
    assert key(RuntimeSpec(options=a)) == key(RuntimeSpec(options=b))


def test_a_mounted_folder_that_was_replaced_is_another(tmp_path):
    (folder := tmp_path / "tools").mkdir()
    spec = RuntimeSpec(image="a", volumes=[Volume(source=str(folder), target="/tools")])
    before = key(spec)
    (folder / "f").touch()
    assert key(spec) == before is not None
    folder.rename(tmp_path / "old")
    assert key(spec) is None, "nobody knows what would be mounted"
    folder.mkdir()
    assert key(spec) not in (None, before)


@pytest.mark.parametrize(
    ("asked", "size", "kept"),
    [
        ({}, 4, {}),
        ({"a": 1}, 4, {}),
        ({"a": 9}, 4, {"a": 4}),
        ({"a": 2}, 4, {"a": 2}),
        ({"a": 9, "b": 3}, 4, {"a": 3, "b": 1}),
        ({"a": 5, "b": 5}, 2, {"a": 1, "b": 1}),
        ({"a": 9, "b": 1}, 0, {}),
    ],
)
def test_shares(asked, size, kept):
    assert shares(asked, size) == kept


@given(st.dictionaries(st.text(max_size=2), st.integers(0, 40), max_size=8), st.integers(0, 32))
def test_shares_are_within_their_bounds(asked, size):
    kept = shares(asked, size)
    able = sum(n for n in asked.values() if n >= AGAIN)
    assert sum(kept.values()) == min(size, able)
    assert all(asked[k] >= AGAIN and 0 < n <= asked[k] for k, n in kept.items())
