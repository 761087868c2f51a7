"""The scripted policy behind SGLang's native contract, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harnesses.policy import Decision, Policy
from tests.proxy.fake_engine import FakeEngine, Reply


@dataclass
class Sampled:
    """One request as the engine saw it."""

    decision: Decision
    rid: str


class ScriptedEngine:
    def __init__(self, tokenizer_folder: Path):
        from tokenizers import Tokenizer

        self.policy = Policy()
        self.log: list[Sampled] = []
        self._tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
        self._end = self._tokenizer.token_to_id("<|im_end|>")
        self._start = self._tokenizer.token_to_id("<|im_start|>")
        self._opening = self._tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
        self._engine = FakeEngine(incremental=True)
        self._engine.default = self._reply
        self._outages: list[asyncio.Task] = []
        self._away: set[tuple[str, int]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-engine", daemon=True)

    def __enter__(self) -> ScriptedEngine:
        self._thread.start()
        self._call(self._engine.start())
        return self

    def __exit__(self, *_: Any) -> None:
        self._call(self._engine.stop())
        self._call(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    @property
    def url(self) -> str:
        return self._engine.url

    def sampled(self, rids: set[str]) -> int:
        """Tokens sent for these requests."""
        return sum(s.sent for s in self._engine.served if s.body["rid"] in rids)

    def of(self, key: str) -> list[Sampled]:
        return [s for s in self.log if s.decision.key == key]

    @property
    def kinds(self) -> dict[str, str]:
        """What each request was taken for."""
        return {s.rid: s.decision.kind for s in self.log}

    def outages(self, key: str) -> int:
        """How often the engine went away in a run."""
        return sum(1 for k, _ in self._away if k == key)

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _finish(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _reply(self, body: dict[str, Any]) -> Reply:
        given = body["input_ids"]
        # An answer that broke off may be continued: what there is of it stands at the prompt's end.
        start = max(i for i, t in enumerate(given) if t == self._start) + len(self._opening)
        decision = self.policy.decide(self._tokenizer.decode(given[:start], skip_special_tokens=False))
        self.log.append(Sampled(decision, body["rid"]))
        ids = [*self._tokenizer.encode(decision.text, add_special_tokens=False).ids, self._end]
        begun = given[start:]
        if begun and ids[: len(begun)] != begun:
            raise AssertionError("the prompt continues an answer that this policy never began")
        ids = ids[len(begun) :]
        reply = Reply(ids=ids)
        turn = decision.turn
        if turn is not None and turn.hold:
            reply.hold_after = len(ids) // 2
        if turn is not None and turn.outage and (decision.key, decision.number) not in self._away:
            self._away.add((decision.key, decision.number))
            reply.hold_after = len(ids) // 2
            self._outages.append(self._loop.create_task(self._outage(turn.outage, body["rid"], len(ids) // 2)))
        return reply

    async def _outage(self, seconds: float, rid: str, after: int) -> None:
        """Stop listening in the middle of an answer, and break it off with that."""
        await self._engine.until(lambda: any(s.body["rid"] == rid and s.sent >= after for s in self._engine.served), 60)
        await self._engine.stop()
        await asyncio.sleep(seconds)
        await self._engine.start()
