"""Programs that use the official JavaScript SDKs (js/*.mjs), run in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "js"
OFFICIAL = ("openaiChat", "openaiResponses", "anthropic", "google")
VERCEL = ("vercelChat", "vercelResponses", "vercelAnthropic")
OPENCODE = ("opencodeChat", "opencodeResponses", "opencodeAnthropic")  # Vercel's SDK as opencode has it inside
SDKS = (*OFFICIAL, *VERCEL, *OPENCODE)


class Running:
    """Jobs of js/client.mjs in a process of its own; `ended` gives what each came to, in turn."""

    def __init__(self, packages: Path, sdk: str, *jobs: dict[str, Any], program: str = "client.mjs"):
        self._packages, self._sdk, self._jobs, self._program = packages, sdk, jobs, program
        self.statuses: list[int] = []

    async def __aenter__(self) -> Running:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            self._packages / "node_modules/.bin/node",
            *("--input-type=module", "--eval", (HERE / self._program).read_text()),
            cwd=self._packages,
            env={"PATH": os.environ["PATH"], "HOME": str(self._packages)},
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=1 << 26,
        )
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"sdk": self._sdk, "jobs": self._jobs}).encode())
        stdin.close()
        return self

    async def __aexit__(self, *_: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def until(self, at: str) -> dict[str, Any]:
        """The next line of this kind. Raises with the program's last words if it ends before."""
        out, err = self._process.stdout, self._process.stderr
        assert out is not None and err is not None
        async for line in out:
            told = json.loads(line)
            if told["at"] == "status":
                self.statuses.append(told["status"])
            if told["at"] == at:
                return told
        raise AssertionError((await err.read()).decode())

    async def ended(self) -> dict[str, Any]:
        """{"turns", "error", "statuses"} of the next job."""
        end = await self.until("end")
        statuses, self.statuses = self.statuses, []
        return {**end, "statuses": statuses}


def job(world: Any, capability: str, steps: list[Any], **more: Any) -> dict[str, Any]:
    base = f"{world.server.url}/s/{capability}"
    return {"base": base, "steps": steps, "system": "Be careful.", "stream": False, "retries": 0, **more}


async def hold(packages: Path, sdk: str, *jobs: dict[str, Any], **program: str) -> list[dict[str, Any]]:
    async with Running(packages, sdk, *jobs, **program) as running:
        return [await running.ended() for _ in jobs]
