"""Every run of a CLI: through which scenario, and in what."""

from __future__ import annotations

from typing import NamedTuple

from tests.harnesses.clis import ALL, OTHERS, Cli
from tests.harnesses.scenarios import SCENARIOS, Scenario


class Case(NamedTuple):
    """`runtime`: `local`, or how the CLI comes into a Docker sandbox."""

    cli: Cli
    scenario: Scenario
    runtime: str = "local"

    @property
    def id(self) -> str:
        return f"{self.cli.id}-{self.scenario.name}"


def pairs(clis: list[Cli]) -> list[tuple[Cli, Scenario]]:
    return [(cli, s) for cli in clis for s in SCENARIOS if cli.runs(s.name, s.needs(cli))]


(MULTI,) = [s for s in SCENARIOS if s.name == "multi_turn"]
SMALL = ("pi", "mini_swe_agent")  # images that are soon made
LOCAL = [Case(cli, s) for cli, s in pairs([*ALL, *OTHERS])]
MOUNTED = [Case(cli, s, "docker, mounted") for cli, s in pairs(ALL) if s.in_docker]
BUILT = [Case(cli, MULTI, "docker, image of one") for cli in ALL]
BUILT_ALL = [Case(cli, MULTI, "docker, image of all") for cli in ALL if cli.harness in SMALL]
DOCKER = [*MOUNTED, *BUILT, *BUILT_ALL]
