"""What agents wrote, on a terminal: all of it is seen, none of it is obeyed."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import msgspec
from rich.table import Table
from rich.text import Text

from cli.stack import toml
from cli.terminal import Terminal, visible
from polar.codec import compress, pack
from polar.config import Settings
from polar.objects import open_objects
from polar.result import Artifact, ErrorInfo, Evaluation, LedgerLine, SessionResult, result_key
from polar.task import AgentSpec, TaskRequest
from polar.trace import Trajectory

HOSTILE = "[/x] [notice] volumes[i] [red]:bug:\x1b[2J\x1b]0;t\x07\x9b31m\r\u202e"
SEEN = r"[/x] [notice] volumes[i] [red]:bug:\x1b[2J\x1b]0;t\x07\x9b31m\r\u202e"


def printed(*objects: object) -> str:
    file = io.StringIO()
    terminal = Terminal(file=file, force_terminal=True, color_system="truecolor", width=200, _environ={})
    for x in objects:
        terminal.print(x, soft_wrap=True)
    return file.getvalue()


def test_a_text_and_a_cell_are_shown_as_they_are():
    table = Table(HOSTILE, title=HOSTILE, title_style=None)
    table.add_row(HOSTILE)
    assert printed(HOSTILE) == SEEN + "\n"
    shown = printed(table)
    assert shown.count(SEEN) == 3
    assert not {c for c in Text.from_ansi(shown).plain if not c.isprintable()} - {"\n"}


def test_lines_tabs_and_other_scripts_stay():
    for text in ("a\tb\nc", "ünï → 漢字 👩‍💻"):
        assert visible(text) == text


def test_a_style_of_ours_is_kept():
    assert printed(Text.assemble(("polar:", "red"), " x")) == "\x1b[31mpolar:\x1b[0m x\n"


ONE = SEEN.replace(r"\r", " ")  # where one line belongs


def polar(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cli.main", *args], capture_output=True, text=True, timeout=60)


def plain(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def test_a_result_with_hostile_names_is_shown_whole(tmp_path):
    result = SessionResult(
        session_id="t.s0", task_id="t", sample_index=0, attempt=1, termination="infra_error", trajectory=Trajectory(builder="exact"),
        error=ErrorInfo(code="prepare_failed", message=f"{HOSTILE}\nt.s1  DONE"),
        evaluation=Evaluation(verdict="evaluator_error", error=ErrorInfo(code="no_report", message=HOSTILE)),
        artifacts=[Artifact(name=f"out/{HOSTILE}\nx", key="k", size=1)],
    )  # fmt: skip
    url = f"file://{tmp_path}/objects"
    open_objects(url).put(result_key("t", "t.s0", 1), compress(pack(result)))
    r = polar("results", "show", "t.s0", "--objects", url)
    assert r.returncode == 0 and not r.stderr, r.stderr
    assert r.stdout.count(ONE) == 3 and plain(r.stdout)
    assert not any(line.startswith(("t.s1", "x")) for line in r.stdout.splitlines())
    r = polar("results", "show", "t.s0", "--objects", url, "--json")
    assert json.loads(r.stdout)["error"]["message"] == f"{HOSTILE}\nt.s1  DONE" and plain(r.stdout)


def test_a_status_and_an_error_with_hostile_texts(store, redis_url, tmp_path):
    config = tmp_path / "polar.toml"
    config.write_text(toml(msgspec.to_builtins(Settings(broker=redis_url, namespace="t", data_dir=str(tmp_path)))))
    store.submit(TaskRequest(agent=AgentSpec(harness="shell", command="x"), instruction="", task_id="t"), "local")
    store.node_beat("a", ready=1, slots=1, backends=["local"])
    ((sid, _),) = store.admit(100, 60)
    s = store.begin(sid, "init", "a", "w", 60)
    error = ErrorInfo(code="prepare_failed", message=HOSTILE)
    store.fail(s, LedgerLine(session_id=sid, attempt=1), error, retry=False, delay=0, mode="worker")
    r = polar("status", "t", "--config", str(config))
    assert r.returncode == 0 and ONE in r.stdout and plain(r.stdout), r.stderr
    r = polar("status", HOSTILE.replace("\r", ""), "--config", str(config))
    assert r.returncode == 4 and SEEN.replace(r"\r", "") in r.stderr and plain(r.stderr), r.stderr
