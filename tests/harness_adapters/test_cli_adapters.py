"""Launch plans of the agent CLIs, golden by value, and what their settings refuse."""

from __future__ import annotations

import json
import shlex
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_adapters import opencode
from harness_adapters.cli import MODEL
from harness_adapters.registry import load_adapter
from harness_adapters.versions import versions
from polar.errors import InvalidTask, UnsupportedSpec
from polar.launch import Endpoint, HarnessAdapter, LaunchPlan
from polar.task import AgentSpec, McpServer

SECRET = "sk-polar-secret"
ENDPOINT = Endpoint(
    base_url=f"http://127.0.0.1:3128/s/{SECRET}", api_key=SECRET, model="claude-sonnet-4-5", context_length=40000
)
NAMES = ["claude_code", "codex", "gemini_cli", "qwen_code", "opencode", "pi"]
STDIO = McpServer(name="files", command="/opt/mcp", args=["--root", "/a b"], env={"K": "v"})
HTTP = McpServer(name="web", transport="streamable-http", url="http://127.0.0.1:9/mcp")
SSE = McpServer(name="old", transport="sse", url="http://127.0.0.1:9/sse")


def plan(name: str, settings: dict | None = None, instruction: str = "Do it.", **agent) -> LaunchPlan:
    spec = AgentSpec(harness=name, settings=settings or {}, **agent)
    return load_adapter(spec).plan(spec, instruction, ENDPOINT)


def content(p: LaunchPlan, name: str):
    """The plan's file of that name, read."""
    (file,) = [f for f in p.files if f.path.endswith("/" + name)]
    if name.endswith(".json"):
        return json.loads(file.content)
    return tomllib.loads(file.content) if name.endswith(".toml") else file.content


def command(p: LaunchPlan) -> str:
    assert isinstance(p.argv, str)
    return p.argv.rpartition("; exec ")[2]


GOLDEN = {
    "claude_code": 'PATH="/opt/polar/claude_code/bin:$PATH"; export PATH; export CLAUDE_CONFIG_DIR="$HOME"/.polar/claude; '
    "exec claude -p --output-format stream-json --verbose --dangerously-skip-permissions --strict-mcp-config",
    "codex": 'PATH="/opt/polar/codex/bin:$PATH"; export PATH; export CODEX_HOME="$HOME"/.polar/codex; '
    "exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json -",
    "gemini_cli": 'PATH="/opt/polar/gemini_cli/bin:$PATH"; export PATH; export GEMINI_CLI_HOME="$HOME"/.polar/gemini '
    'GEMINI_EXP="$HOME"/.polar/gemini/experiments.json; '
    "exec gemini --yolo --skip-trust --model polar-model --output-format stream-json",
    "qwen_code": 'PATH="/opt/polar/qwen_code/bin:$PATH"; export PATH; export QWEN_HOME="$HOME"/.polar/qwen; '
    "exec qwen --yolo --auth-type openai --model polar-model --output-format stream-json --chat-recording",
    "opencode": 'PATH="/opt/polar/opencode/bin:$PATH"; export PATH; '
    'export OPENCODE_CONFIG="$HOME"/.polar/opencode/config.json OPENCODE_CONFIG_DIR="$HOME"/.polar/opencode; '
    + opencode._NO_INSTALL
    + "; exec opencode run --title task --format json",
    "pi": 'PATH="/opt/polar/pi/bin:$PATH"; export PATH; export PI_CODING_AGENT_DIR="$HOME"/.polar/pi; '
    "exec pi -p --mode json --provider polar --model polar-model --thinking medium --no-approve",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_launch_line(name):
    p = plan(name, instruction="Ein 'Wort'\n$HOME — 世界")
    assert p.argv == GOLDEN[name]
    # The task comes on standard input, neither it nor the capability in process listings.
    assert p.stdin == "Ein 'Wort'\n$HOME — 世界" and SECRET not in p.argv
    assert all(f.path.startswith("~/.polar/") and f.mode == 0o600 for f in p.files)
    assert p.artifacts and all(a.startswith("~/") for a in p.artifacts)
    assert p.version_argv and p.version_argv[-1].endswith(" --version")
    adapter = load_adapter(AgentSpec(harness=name))
    assert isinstance(adapter, HarnessAdapter) and adapter.requires_completions


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_asked_by_a_name_that_no_cli_knows(name):
    p = plan(name)
    text = f"{p.argv} {p.env} {[f.content for f in p.files]}"
    assert MODEL in text and "claude-sonnet-4-5" not in text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_windw": 1}, r"\.context_windw: unknown to the '\w+' harness; allowed: command.*mean 'context_window'"),
        ({"context_window": 50000}, r"agent\.settings\.context_window: found 50000, the model has 40000"),
        ({"max_output_tokens": "8k"}, r"agent\.settings\.max_output_tokens"),
        ({"extra_args": "--x"}, r"agent\.settings\.extra_args"),
        ({"command": ""}, r"agent\.settings\.command"),
    ],
)  # fmt: skip
def test_settings_are_strict(name, settings, message):
    with pytest.raises(InvalidTask, match=message):
        plan(name, settings)


@pytest.mark.parametrize("name", NAMES)
def test_command_and_extra_args(name):
    p = plan(name, {"command": "/opt/my cli/run", "extra_args": ["--x", "a b", "$HOME"]})
    words = shlex.split(command(p))
    assert words[0] == "/opt/my cli/run" and words[-3:] == ["--x", "a b", "$HOME"]
    assert p.version_argv and "'/opt/my cli/run' --version" in p.version_argv[-1]


@pytest.mark.parametrize("name", NAMES)
def test_the_task_may_change_defaults_but_not_the_way_to_the_model(name):
    p = plan(name)
    way = {k for k, v in p.env.items() if SECRET in v}
    assert way
    changed = plan(name, env={**{k: "http://elsewhere" for k in way}, "MINE": "1", "NO_COLOR": "0"})
    assert {k: changed.env[k] for k in way} == {k: p.env[k] for k in way}
    assert changed.env["MINE"] == "1" and changed.env["NO_COLOR"] == "0"


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip))
def test_any_instruction_is_handed_over_as_it_is(name, text):
    assert plan(name, instruction=text).stdin == text


# -- what each is told


def test_claude_code():
    settings = {"effort": "low", "thinking": False, "allowed_tools": ["Bash", "Edit"], "max_turns": 5, "bare": True,
                "system_prompt_append": "Be brief.", "context_window": 30000, "max_output_tokens": 4000}  # fmt: skip
    p = plan("claude_code", settings)
    assert command(p).endswith(
        '--bare --effort low --max-turns 5 --tools Bash,Edit --append-system-prompt-file "$HOME"/.polar/claude/append.md'
    )
    assert content(p, "append.md") == "Be brief."
    expected = {
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "30000",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4000",
        "MAX_THINKING_TOKENS": "0",
        "API_TIMEOUT_MS": "3600000",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "3600000",
        "ANTHROPIC_BASE_URL": ENDPOINT.base_url,
        "ANTHROPIC_API_KEY": SECRET,
        "CLAUDE_CODE_SUBAGENT_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
    }
    assert {k: p.env[k] for k in expected} == expected
    assert "MAX_THINKING_TOKENS" not in plan("claude_code").env


def test_codex():
    p = plan(
        "codex",
        {
            "effort": "high",
            "system_prompt_append": 'Say "é"\x7f\n',
            "context_window": 32000,
            "max_output_tokens": 2000,
            "bare": True,
        },
    )
    config = content(p, "config.toml")
    assert config["model_providers"]["polar"] == {
        "name": "polar",
        "base_url": f"{ENDPOINT.base_url}/v1",
        "env_key": "POLAR_API_KEY",
        "wire_api": "responses",
        "stream_idle_timeout_ms": 3600000,
        "request_max_retries": 8,
        "stream_max_retries": 8,
    }
    assert (config["model_context_window"], config["model_auto_compact_token_limit"]) == (32000, 30000)
    assert config["features"] == {"plugins": False, "apps": False, "unbounded_connection_retries": False,
                                  "multi_agent": False, "goals": False, "skill_search": False}  # fmt: skip
    assert config["model_reasoning_effort"] == "high" and config["developer_instructions"] == 'Say "é"\x7f\n'
    assert config["approval_policy"] == "never" and config["sandbox_mode"] == "danger-full-access"
    assert config["analytics"]["enabled"] is False and config["check_for_update_on_startup"] is False
    assert p.env["POLAR_API_KEY"] == SECRET
    assert content(plan("codex", {"thinking": False}), "config.toml")["model_reasoning_effort"] == "none"


def test_gemini_cli():
    p = plan("gemini_cli", {"allowed_tools": ["run_shell_command"], "system_prompt_append": "Be brief.", "effort": "low",
                            "context_window": 20000, "max_output_tokens": 3616})  # fmt: skip
    settings = content(p, "settings.json")
    assert settings["security"] == {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}}
    assert settings["model"] == {
        "disableLoopDetection": True,
        "skipNextSpeakerCheck": True,
        "compressionThreshold": 1 / 64,
    }
    (override,) = settings["modelConfigs"]["customOverrides"]
    assert override["match"] == {"model": MODEL} and override["modelConfig"]["generateContentConfig"] == {
        "maxOutputTokens": 3616, "thinkingConfig": {"includeThoughts": True, "thinkingLevel": "LOW"},
    }  # fmt: skip
    assert settings["tools"] == {"core": ["run_shell_command"]} and content(p, "GEMINI.md") == "Be brief."
    flags = {f["flagId"]: f["intValue"] for f in content(p, "experiments.json")["flags"]}
    assert flags == {45773134: "3600", 45758817: "1000000000"}
    assert p.env["GOOGLE_GEMINI_BASE_URL"] == ENDPOINT.base_url and p.env["GEMINI_API_KEY"] == SECRET


def test_qwen_code():
    p = plan(
        "qwen_code",
        {"effort": "high", "context_window": 30000, "allowed_tools": ["edit"], "system_prompt_append": "Be\nbrief."},
    )
    settings = content(p, "settings.json")
    (model,) = settings["modelProviders"]["openai"]
    assert model["baseUrl"] == f"{ENDPOINT.base_url}/v1" and model["envKey"] == "OPENAI_API_KEY"
    generation = model["generationConfig"]
    assert (generation["contextWindowSize"], generation["timeout"], generation["streamIdleTimeoutMs"]) == (
        30000,
        3600000,
        0,
    )
    assert generation["reasoning"] == {"effort": "high"} and settings["tools"]["core"] == ["edit"]
    assert settings["context"]["clearContextOnIdle"]["toolResultsTotalCharsThreshold"] == -1
    assert not any(settings["memory"].values()) and not settings["privacy"]["usageStatisticsEnabled"]
    assert shlex.split(command(p))[-2:] == ["--append-system-prompt", "Be\nbrief."]
    off = content(plan("qwen_code", {"thinking": False, "dialect": "anthropic"}), "settings.json")
    (model,) = off["modelProviders"]["anthropic"]
    assert model["baseUrl"] == ENDPOINT.base_url and model["generationConfig"]["reasoning"] is False


def test_opencode():
    p = plan(
        "opencode",
        {
            "context_window": 30000,
            "max_output_tokens": 3000,
            "allowed_tools": ["bash"],
            "system_prompt_append": "Be brief.",
        },
    )
    config = content(p, "config.json")
    provider = config["provider"]["polar"]
    assert (
        provider["npm"] == "@ai-sdk/openai-compatible" and provider["options"]["baseURL"] == f"{ENDPOINT.base_url}/v1"
    )
    assert provider["models"][MODEL]["limit"] == {"context": 30000, "output": 3000}
    assert config["tools"] == {"*": False, "bash": True} and config["permission"] == "allow"
    assert config["share"] == "disabled" and config["autoupdate"] is False and config["enabled_providers"] == ["polar"]
    assert content(p, "append.md") == "Be brief." and config["instructions"] == ["~/.polar/opencode/append.md"]
    assert SECRET not in json.dumps(config["provider"]["polar"]["options"]["apiKey"])


def test_pi():
    p = plan(
        "pi",
        {
            "thinking": False,
            "allowed_tools": ["bash", "edit"],
            "system_prompt_append": "Be brief.",
            "context_window": 30000,
        },
    )
    assert command(p).endswith(
        '--thinking off --no-approve --tools bash,edit --append-system-prompt "$HOME"/.polar/pi/append.md'
    )
    provider = content(p, "models.json")["providers"]["polar"]
    assert provider["api"] == "openai-completions" and provider["baseUrl"] == f"{ENDPOINT.base_url}/v1"
    assert provider["apiKey"] == "$POLAR_API_KEY" and p.env["POLAR_API_KEY"] == SECRET and p.env["PI_OFFLINE"] == "1"
    (model,) = provider["models"]
    assert (model["contextWindow"], model["maxTokens"], model["reasoning"]) == (30000, 7500, False)
    settings = content(p, "settings.json")
    assert settings["httpIdleTimeoutMs"] == 0 and settings["compaction"]["reserveTokens"] == 7500
    assert command(plan("pi", {"allowed_tools": []})).endswith("--no-tools")
    for dialect, api, path in (("anthropic", "anthropic-messages", ""), ("google", "google-generative-ai", "/v1beta"),
                               ("openai_responses", "openai-responses", "/v1")):  # fmt: skip
        provider = content(plan("pi", {"dialect": dialect}), "models.json")["providers"]["polar"]
        assert (provider["api"], provider["baseUrl"]) == (api, ENDPOINT.base_url + path)


# -- MCP servers and skills


PLAIN = {"command": "/opt/mcp", "args": ["--root", "/a b"], "env": {"K": "v"}}
LOCAL = {"type": "local", "command": ["/opt/mcp", "--root", "/a b"], "environment": {"K": "v"}, "enabled": True}
REMOTE = {"type": "remote", "url": HTTP.url, "enabled": True}


@pytest.mark.parametrize(
    ("name", "file", "key", "stdio", "http"),
    [
        ("claude_code", "mcp.json", "mcpServers", {"type": "stdio", **PLAIN}, {"type": "http", "url": HTTP.url}),
        ("codex", "config.toml", "mcp_servers", PLAIN, {"url": HTTP.url}),
        ("gemini_cli", "settings.json", "mcpServers", {**PLAIN, "trust": True}, {"httpUrl": HTTP.url, "trust": True}),
        ("qwen_code", "settings.json", "mcpServers", {**PLAIN, "trust": True}, {"httpUrl": HTTP.url, "trust": True}),
        ("opencode", "config.json", "mcp", LOCAL, REMOTE),
        ("pi", "mcp.json", "mcpServers", {**PLAIN, "exposure": "direct"}, {"url": HTTP.url, "exposure": "direct"}),
    ],
)
def test_mcp_servers(name, file, key, stdio, http):
    assert content(plan(name, mcp_servers=[STDIO, HTTP]), file)[key] == {"files": stdio, "web": http}


@pytest.mark.parametrize("name", NAMES)
def test_mcp_servers_are_checked(name):
    with pytest.raises(InvalidTask, match=r"agent\.mcp_servers\[1\]\.name: 'files' is there twice"):
        plan(name, mcp_servers=[STDIO, STDIO])
    with pytest.raises(InvalidTask, match=r"agent\.mcp_servers\[0\]\.name"):
        plan(name, mcp_servers=[McpServer(name="a.b c", command="x")])
    if name in ("codex", "pi"):
        with pytest.raises(UnsupportedSpec, match=r"agent\.mcp_servers\[0\]\.transport"):
            plan(name, mcp_servers=[SSE])
    else:
        plan(name, mcp_servers=[SSE])


@pytest.mark.parametrize("name", NAMES)
def test_skills_are_linked_to_where_the_cli_looks(name):
    p = plan(name, skills_path="/data/my skills")
    assert isinstance(p.argv, str) and "ln -sfn '/data/my skills' \"$HOME\"/.polar/" in p.argv
    relative = plan(name, skills_path="skills").argv
    assert isinstance(relative, str) and 'ln -sfn "$PWD"/skills "$HOME"/.polar/' in relative
    with pytest.raises(InvalidTask, match=r"agent\.skills_path"):
        plan(name, skills_path="")


def test_every_bundled_harness_has_an_adapter():
    for name, harness in versions().harnesses.items():
        assert load_adapter(AgentSpec(harness=name)).name == name
        assert bool(harness.npm) != bool(harness.pypi) and harness.version[0].isdigit()
