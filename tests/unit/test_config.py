"""Settings and connection URLs: what is accepted, and what the refusal says."""

from __future__ import annotations

import pytest

from polar.config import Model, Settings, load
from polar.errors import InvalidConfig
from polar.store.connection import for_celery, parse, redact


def test_file_environment_and_overrides_in_that_order(tmp_path):
    file = tmp_path / "polar.toml"
    file.write_text('namespace = "x"\nlease_seconds = 5\n[models.policy]\nengine = "http://e"\ntokenizer = "/t"\n')
    s = load(file, env={"POLAR_LEASE_SECONDS": "7", "POLAR_KEEP_CAPTURE": "false"}, data_dir="/d")
    assert (s.namespace, s.lease_seconds, s.keep_capture, s.data_dir) == ("x", 7.0, False, "/d")
    assert s.objects_url == "file:///d/objects" and s.store_url == s.broker
    assert s.model("whatever")[0] == "policy", "an unknown name means the default model"


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
