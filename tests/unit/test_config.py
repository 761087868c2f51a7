"""Settings and connection URLs: what is accepted, and what the refusal says."""

from __future__ import annotations

import pytest

from polar.config import Model, Settings, load, without_settings
from polar.errors import InvalidConfig
from polar.store.connection import for_celery, parse, redact


def test_file_environment_and_overrides_in_that_order(tmp_path):
    file = tmp_path / "polar.toml"
    file.write_text('namespace = "x"\nlease_seconds = 5\n[models.policy]\nengine = "http://e"\ntokenizer = "/t"\n')
    s = load(file, env={"POLAR_LEASE_SECONDS": "7", "POLAR_KEEP_CAPTURE": "false"}, data_dir="/d")
    assert (s.namespace, s.lease_seconds, s.keep_capture, s.data_dir) == ("x", 7.0, False, "/d")
    assert s.objects_url == "file:///d/objects" and s.store_url == s.broker
    assert s.model("whatever")[0] == "policy", "an unknown name means the default model"


def test_the_environment_gives_lists_and_names_of_variables_too(tmp_path):
    file = tmp_path / "polar.toml"
    file.write_text('runtimes = ["local"]\nvolume_roots = ["/a"]\n')
    env = {"POLAR_RUNTIMES": "docker, apptainer", "POLAR_VOLUME_ROOTS": "/data", "POLAR_API_TOKEN_ENV": "MY_TOKEN"}
    s = load(file, env=env)
    assert (s.runtimes, s.volume_roots, s.api_token_env) == (["docker", "apptainer"], ["/data"], "MY_TOKEN")
    assert load(file, env=env, runtimes=["x"]).runtimes == ["x"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("POLAR_MODELS", "policy=http://e"),
        ("POLAR_RUNTIMES", ""),
        ("POLAR_RUNTIMES", "docker,"),
        ("POLAR_LEASE_SECONDS", "soon"),
        ("POLAR_READY_PLACES", "0"),
        ("POLAR_KEEP_CAPTURE", "perhaps"),
        ("POLAR_NAMESPACE", "a b"),
    ],
)
def test_what_a_variable_cannot_give_is_refused_by_its_name(tmp_path, variable, value):
    file = tmp_path / "polar.toml"
    file.write_text("ready_places = 3\n")
    with pytest.raises(InvalidConfig, match=variable):
        load(file, env={variable: value})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lease = 5", "lease: unknown field"),
        ("lease_seconds = -1", "lease_seconds: found -1"),
        ('namespace = "a b"', "namespace"),
        ("[models.policy]\nengine = 'x'", "models"),
        ("lease_seconds = ", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, says):
    file = tmp_path / "polar.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfig, match=says) as e:
        load(file, env={})
    assert str(file) in e.value.message


def test_a_missing_file_or_model_is_named(tmp_path):
    with pytest.raises(InvalidConfig, match="no such file"):
        load(tmp_path / "none.toml", env={})
    with pytest.raises(InvalidConfig, match="no row for 'm'"):
        Settings().model("m")
    assert Settings(models={"m": Model(engine="e", tokenizer="t")}).model("m")[0] == "m"


@pytest.mark.parametrize(
    ("url", "celery", "options"),
    [
        ("redis://h:1/2", "redis://h:1/2", {}),
        ("rediss://:pw@h:1/2", "rediss://:pw@h:1/2", {}),
        ("unix:///tmp/s?db=3", "redis+socket:///tmp/s?virtual_host=3", {}),
        (
            "sentinel://:pw@a:1,b/mymaster?db=4",
            "sentinel://:pw@a:1/4;sentinel://:pw@b:26379/4",
            {"master_name": "mymaster"},
        ),
    ],
)
def test_one_url_syntax_for_store_and_broker(url, celery, options):
    assert for_celery(url) == (celery, options)


def test_unknown_schemes_are_refused_without_showing_the_password():
    with pytest.raises(InvalidConfig) as e:
        parse("amqp://user:secret@host/")
    assert "amqp" in e.value.message and "secret" not in e.value.message
    assert redact("redis://u:secret@h/0") == "redis://***@h/0"


def test_a_child_with_a_file_gets_no_setting_from_the_environment():
    env = {
        "POLAR_PROXY_URL": "http://x",
        "POLAR_CONFIG": "y",
        "POLAR_API_TOKEN": "t",
        "POLAR_HARNESSES": "/h",
        "PATH": "/bin",
    }
    kept = without_settings(env)
    assert kept == {"POLAR_API_TOKEN": "t", "POLAR_HARNESSES": "/h", "PATH": "/bin"}
    assert load(env=kept).proxy_url == load(env={}).proxy_url
