"""What each CLI is run through: the script of the policy, and what must be true of the session that comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.harnesses.clis import Cli
from tests.harnesses.policy import Script, Turn

UNICODE = "Grüße, 世界 🎉 — naïve café"
FILE = "notes.txt"
PART = "part.txt"
THOUGHT = "What is to do? A file, an edit."
OUTAGE = 20.0  # seconds


@dataclass(frozen=True)
class Scenario:
    """`files` are the sandbox files that must come out, with their text; `heard` what must have come back to the model, which
    no command says in these words; `said` what must be among the answers as they were read. `append_only`: its history is
    never rewritten. `kinds`: what the policy must have been asked for. `model`: a row of the deployment's table. `exit_code`
    of a CLI that isn't stopped and has room; `notes` must be true of the result's. `in_docker`: the sandbox matters to it."""

    name: str
    script: Callable[[Cli, str], Script]
    instruction: str
    termination: str = "finished"
    exit_code: int = 0
    append_only: bool = True
    files: dict[str, str] = field(default_factory=dict)
    heard: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset({"main"})
    model: str = "policy"
    outage: float = 0.0  # seconds
    settings: Callable[[Cli], dict[str, Any]] = lambda cli: {}
    task: Callable[[Cli], dict[str, Any]] = lambda cli: {}
    needs: Callable[[Cli], bool] = lambda cli: True
    notes: Callable[[dict[str, Any]], bool] = lambda notes: True
    in_docker: bool = True
    min_chains: int = 1
    min_turns: int = 1


def _final(cli: Cli, text: str) -> Turn:
    return Turn(text=text, calls=(cli.ends_by,) if cli.ends_by else ())


def _multi(cli: Cli, key: str) -> Script:
    sh = cli.shell
    turns = [
        Turn("First a file.", (sh(f"printf '%s\\n' '{UNICODE}' 'colour: red' > {FILE}"),), reasoning=THOUGHT),
        Turn("Two looks at once.", (sh(f"cat {FILE}"), sh(f"wc -c {FILE}"))),
        Turn("", (sh("cat no-such-file; exit 3"),), reasoning="This will fail: “naïve”."),
        *([Turn("Read before the edit.", (cli.read(FILE),))] if cli.read else []),
        Turn("Now the edit.", (cli.edit(FILE, "colour: red", "colour: blue"),)),
        Turn(f"Is it right? {UNICODE}", (sh(f"cat {FILE}; echo 'quoted \"x\" \\n é'"),), reasoning="Reading it again."),
        Turn("Once more.", (sh("pwd"), sh("printf 'left-%d' 41"), sh("printf 'right-%d' 42"))),
        _final(cli, f"Done. {UNICODE}"),
    ]  # fmt: skip
    return Script(turns)


def _await(path: str) -> str:
    return f"timeout 25 sh -c 'until [ -s {path} ]; do sleep 0.1; done'; cat {path}"


def _task(key: str) -> str:
    return f"Do the part [[{key}/part]]: write the file {PART} with a command."


def _subagent(cli: Cli, key: str) -> Script:
    assert cli.subagent is not None
    turns = [
        Turn("A look around.", (cli.shell("ls -a"),)),
        Turn("Somebody else does the part.", tuple(cli.subagent(_task(key)))),
        Turn("Waiting for it.", (cli.shell(_await(PART)),)),
        Turn("A last look.", (cli.shell("echo checked"),)),
        _final(cli, "All parts are done."),
    ]  # fmt: skip
    part = [
        Turn("The part.", (cli.shell(f"echo the part > {PART}"),), reasoning="Only the part."),
        Turn("A look at it.", (cli.shell(f"cat {PART}"),)),
        Turn("The part is done."),
    ]
    return Script(turns, {"part": part})


def _background(cli: Cli, key: str) -> Script:
    """Each waits for the other once: only side by side do they come to their end."""
    assert cli.background is not None
    turns = [
        Turn("Somebody else does the part.", tuple(cli.background(_task(key)))),
        Turn("Meanwhile.", (cli.shell(f"echo go > go.txt; {_await(PART)}"),)),
        Turn("A last look.", (cli.shell("echo checked"),)),
        _final(cli, "All parts are done."),
    ]
    part = [
        Turn("The part.", (cli.shell(f"{_await('go.txt')} && echo the part > {PART}"),)),
        Turn("A look at it.", (cli.shell(f"cat {PART}"),)),
        Turn("The part is done."),
    ]
    return Script(turns, {"part": part})


def _page(cli: Cli, n: int, lines: int = 150) -> Turn:
    # Not by a loop: one CLI refuses commands with substitutions in them.
    return Turn(f"Page {n}.", (cli.shell(f"seq -f 'line %g of page {n}: what is written there' {lines}"),))


def _compaction(cli: Cli, key: str) -> Script:
    turns = [_page(cli, n) for n in range(1, 13)]
    return Script([*turns, Turn("The file.", (cli.shell(f"echo read > {FILE}"),)), _final(cli, "All pages are read.")])


def _overflow(cli: Cli, key: str) -> Script:
    turns = [Turn("A file.", (cli.shell(f"echo begun > {FILE}"),)), *(_page(cli, n) for n in range(1, 31))]
    return Script([*turns, _final(cli, "All pages are read, and this is never said.")])


def _timeout(cli: Cli, key: str) -> Script:
    turns = [
        Turn("A file.", (cli.shell(f"echo begun > {FILE}"),)),
        Turn("This thought never comes to its end, however long one waits for it. " * 4, hold=True),
    ]
    return Script(turns)


def _outage(cli: Cli, key: str) -> Script:
    turns = [
        Turn("A file.", (cli.shell(f"echo begun > {FILE}"),)),
        Turn("The engine goes away in the middle of this.", (cli.shell(f"echo and on >> {FILE}"),), outage=OUTAGE),
        Turn("A look.", (cli.shell(f"cat {FILE}"),)),
        _final(cli, "Done after all."),
    ]
    return Script(turns)


def _denied(cli: Cli, key: str) -> Script:
    turns = [Turn("Not this.", (cli.shell("touch x.txt"),)), Turn("A file.", (cli.shell(f"echo begun > {FILE}"),))]
    return Script([*turns, _final(cli, "Done, but for what was denied.")])


def _mended(cli: Cli, key: str) -> Script:
    """Two pages at once, so that what was fine a turn ago is far too long."""
    pages = tuple(call for n in (1, 2) for call in _page(cli, n, 1500).calls)
    turns = [Turn("A file.", (cli.shell(f"echo begun > {FILE}"),)), Turn("Two pages.", pages)]
    return Script([*turns, Turn("On.", (cli.shell(f"echo and on >> {FILE}"),)), _final(cli, "Done after all.")])


def _long_output(cli: Cli, key: str) -> Script:
    turns = [_page(cli, n, 1000) for n in range(1, 29)]  # of 42 kB
    return Script([*turns, Turn("The file.", (cli.shell(f"echo read > {FILE}"),)), _final(cli, "All pages are read.")])


SCENARIOS = [
    Scenario(
        "multi_turn",
        _multi,
        f"Work on the notes [[run:KEY]]. Say hello: {UNICODE}\nTwo lines, 'quotes' and \"more\" of $them.",
        files={FILE: f"{UNICODE}\ncolour: blue\n"},
        heard=(
            f"{len(f'{UNICODE}{chr(10)}colour: red{chr(10)}'.encode())} {FILE}",
            "no-such-file: No such file",
            "left-41",
            "right-42",
        ),
        said=(THOUGHT,),
        min_turns=7,
    ),
    Scenario(
        "subagent",
        _subagent,
        "Do it in parts [[run:KEY]].",
        files={PART: "the part\n"},
        kinds=frozenset({"main", "task"}),
        needs=lambda cli: cli.subagent is not None,
        min_chains=2,
        min_turns=7,
    ),
    Scenario(
        "compaction",
        _compaction,
        "Read all pages [[run:KEY]].",
        append_only=False,
        files={FILE: "read\n"},
        heard=("line 149 of page 1:",),
        kinds=frozenset({"main", "compaction"}),
        settings=lambda cli: {"context_window": cli.window},
        needs=lambda cli: cli.compacts,
        min_chains=2,
        min_turns=14,
    ),
    Scenario(
        "timeout",
        _timeout,
        "Think long [[run:KEY]].",
        termination="agent_timeout",
        files={FILE: "begun\n"},
        task=lambda cli: {"agent_timeout_seconds": cli.budget},
        min_turns=2,
    ),
    Scenario(
        "outage",
        _outage,
        "Go on whatever happens [[run:KEY]].",
        files={FILE: "begun\nand on\n"},
        outage=OUTAGE,
        min_turns=4,
    ),
    Scenario(
        "overflow",
        _overflow,
        "Read all pages [[run:KEY]].",
        termination="context_overflow",
        files={FILE: "begun\n"},
        heard=("line 149 of page 1:",),
        model="small",
        needs=lambda cli: not cli.compacts,
        min_turns=3,
    ),
    Scenario(
        "background",
        _background,
        "Do it in parts, side by side [[run:KEY]].",
        files={PART: "the part\n"},
        kinds=frozenset({"main", "task"}),
        needs=lambda cli: cli.background is not None,
        in_docker=False,
        min_chains=2,
        min_turns=7,
    ),
    Scenario(
        "denied",
        _denied,
        "Do what you may [[run:KEY]].",
        termination="agent_error",
        files={FILE: "begun\n"},
        settings=lambda cli: {"extra_args": list(cli.denies)},
        needs=lambda cli: bool(cli.denies),
        notes=lambda notes: notes.get("denied_tools") == 1 and "after denied tools" in notes.get("error", ""),
        in_docker=False,
        min_turns=3,
    ),
    Scenario(
        "mended",
        _mended,
        "Read two pages [[run:KEY]].",
        exit_code=1,
        append_only=False,
        files={FILE: "begun\nand on\n"},
        kinds=frozenset({"main", "compaction"}),
        model="small",
        settings=lambda cli: {"max_output_tokens": 1000},
        needs=lambda cli: cli.mends,
        notes=lambda notes: "maximum context length" in notes.get("mended", ""),
        in_docker=False,
        min_chains=2,
        min_turns=5,
    ),
    Scenario(
        "long_output",
        _long_output,
        "Read all pages [[run:KEY]].",
        append_only=False,  # it has to compact for so much
        files={FILE: "read\n"},
        heard=("line 149 of page 1:",),
        needs=lambda cli: cli.retells,
        # Longer than what is kept of the output, the last event of it.
        notes=lambda notes: "partial" in notes and notes.get("stop_reason") == "stop" and "turns" not in notes,
        in_docker=False,
        min_turns=30,
    ),
]
