"""One generation: from a linked prompt to a stored completion. Any number of clients may listen to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from typing import TYPE_CHECKING, Any

from polar.completion import Completion
from polar.ids import new_id
from polar.store.capture import Grant
from proxy import linking, logs, record, remote_prompt, retries, sampling
from proxy.attempt import Attempt, Node
from proxy.broadcast import Broadcast
from proxy.codec import PROMPT_TAIL
from proxy.engines.base import Order, Sample
from proxy.failures import CallError, gone, overflow, unavailable
from proxy.linking import Match, Plan
from proxy.neutral import Event, Message, Request, unfold
from proxy.record import Made
from proxy.stream_parser import Contradiction, StreamParser
from proxy.table import Served

if TYPE_CHECKING:
    from proxy.service import Service

log = logging.getLogger("polar.proxy")

# A retry waits for the end of what it retries: then it is known whether it repeats, replays or continues.
_WAIT_FOR_ABORTED = 5.0


class Generation(Broadcast):
    """One call to the model. `waited`: seconds that others took, the engine and pauses."""

    def __init__(
        self,
        service: Service,
        grant: Grant,
        served: Served,
        attempt: Attempt,
        request: Request,
        dialect: str,
        request_hash: str,
    ):
        super().__init__()
        self.id = new_id("c")
        self.grant, self.served, self.attempt, self.request = grant, served, attempt, request
        self.request_hash = request_hash
        self.after: Generation | None = None  # an aborted one of the same request, still being stored
        self.created = time.time()
        self.node: Node | None = None
        self.prompt_tokens = 0
        self.waited = 0.0
        self._service, self._dialect = service, dialect
        self._registered = False
        self._planning = False  # while the store is asked to register it, or has
        self._storing = False

    def cancel(self, reason: str) -> None:
        if not self.done and not self.cancelled:
            super().cancel(reason)
            if self._planning:  # a plan may take long, and nothing will come of it: neither turn nor drain waits for it
                self._service.store.give_back(self.grant, self.id)
            self._service.metrics.aborted(reason)
            log.info("generation aborted", extra={**self._ids(), "why": reason})

    def delivered(self) -> None:
        """A client got the whole answer."""
        if self.node is not None and not (self.node.delivered and self.node.certain):
            self.node.delivered = self.node.certain = True
            self._service.store.delivered(self.attempt.id, self.node.id)

    async def run(self) -> None:
        """To the end, whatever happens; never raises."""
        try:
            await self._run()
        except CallError as e:
            self.error = e
        except Exception:
            log.exception("generation failed", extra=self._ids())
            self.error = CallError("internal", "the proxy failed to serve this call", code="internal")
        finally:
            if self.error is not None:
                self.attempt.fail(self.request_hash)
                await self._service.store.note(self.grant, self.error, self.attempt)
            if self.attempt.generations.get(self.request_hash) is self:
                del self.attempt.generations[self.request_hash]
            self.close()

    async def _run(self) -> None:
        store, attempt = self._service.store, self.attempt
        if self.after is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.after.ended.wait(), _WAIT_FOR_ABORTED)
            self.after = None
        if not attempt.seen.count:
            await store.sync(attempt)  # another proxy may have served this session until now
        own = self.id  # a replay takes the id of what it replays
        try:
            while not await self._go():
                pass
        finally:
            if self._registered and not self._storing:
                await store.abandon(self.grant, own)

    async def _go(self) -> bool:
        """Plan, begin, sample. False: something was stored that the plan should have known, or a pause has begun."""
        store, request, attempt, served = self._service.store, self.request, self.attempt, self.served
        if least := served.hopeless(request.messages):
            await store.check_open(self.grant)
            raise overflow(least, served.row.context_length)
        digests, known = attempt.read(request.messages), attempt.seen.count
        tools = linking.tools_hash(request)
        found = linking.match(attempt, request, digests, self.request_hash, tools, served.key)
        latest = found.latest
        if latest is not None and await retries.wants_again(store, attempt, request, self.request_hash, latest):
            await store.check_open(self.grant)
            self._replay(latest)
            return True
        planned, pauses = None, self._service.pauses
        if not pauses.free(served.key) or self._scarce():
            await store.check_open(self.grant)
            planned = await self._plan(digests, found, tools)  # what can't be asked is refused at once
            held = time.monotonic()
            await pauses.wait(served.key, self._cancel)
            self.waited += time.monotonic() - held
            if self.cancelled:
                raise self._broken(Sample())
            if attempt.seen.count > known:
                return False
        self._flight = pauses.begin(served.key)
        try:
            return await self._begun(digests, found, tools, planned)
        finally:
            self._flight.land()

    def _scarce(self) -> bool:
        """Whether a turn that is only taken for a moment, by a call that can't be asked, may be another call's last."""
        return 0 < self.grant.max_turns <= self.attempt.seen.count + len(self.attempt.generations)

    async def _begun(self, digests: array, found: Match, tools: str, planned: Plan | None) -> bool:
        # The store is asked while the prompt is planned; if it has news, the plan is made again.
        self._planning = True
        beginning = asyncio.create_task(self._service.store.begin(self.grant, self.id, self.attempt))
        refused: CallError | None = None
        try:
            for _ in range(2):  # the task runs, then its command goes out
                await asyncio.sleep(0)
            plan = planned or await self._plan(digests, found, tools)
        except CallError as e:
            refused = e
        finally:
            index, news = await beginning  # that the session has ended goes before what is wrong with the prompt
            self._registered, self._planning = index >= 0, False
        if self.cancelled:
            raise self._broken(Sample())
        if news or not self._service.pauses.free(self.served.key):
            return False
        if refused is not None:
            raise refused
        log.debug(
            "generation begun", extra={**self._ids(), "index": index, "link": plan.link, "prompt": len(plan.prompt)}
        )
        await self._sample(plan, found, index, tools)
        return True

    async def _plan(self, digests: array, found: Match, tools: str) -> Plan:
        attempt, served, request = self.attempt, self.served, self.request
        if served.engine.renders:
            plan = await remote_prompt.plan(attempt, served.codec, request, digests, found)
        else:
            plan = await linking.plan(attempt, served.codec, request, digests, found, tools, served.key)
        self.prompt_tokens = len(plan.prompt)
        if len(plan.prompt) >= served.row.context_length:
            raise overflow(len(plan.prompt), served.row.context_length)
        return plan

    async def _sample(self, plan: Plan, found: Match, index: int, tools: str) -> None:
        """Sample, store, publish. Raises CallError if there is no whole answer."""
        request, served = self.request, self.served
        room = served.row.context_length - len(plan.prompt)
        params = sampling.effective(self.grant, request, served.row.max_new_tokens, room)
        if params.get("seed") is not None:
            params["seed"] = sampling.seed_of(params["seed"], self.grant.session_id, self.grant.attempt, index)
        parser = StreamParser(
            served.codec,
            plan.prompt[-PROMPT_TAIL:].tolist(),
            request.tools + request.later_tools,
            request.calls_allowed,
            request.stop,
            f"call_{self.id[2:]}",
        )
        order = Order(
            rid=self.id,
            prompt=plan.prompt,
            sampling=params,
            stop_ids=sorted(served.codec.stop_ids),
            tokens=lambda ids: self.publish(self._fed(parser, ids)),
            accepted=self.accept,
            cancel=self._cancel,
            session=self.grant.attempt_id,
            vocabulary=served.vocabulary,
            decode=served.codec.decode,
            gate=lambda: self._service.pauses.again(served.key, self._cancel),
            schema=request.schema,
            messages=request.messages,
            tools=request.tools,
            tool_choice=request.tool_choice,
            events=self.publish,
        )
        started = time.time()
        asked = time.monotonic()
        sample = await served.engine.generate(order)
        self.waited += time.monotonic() - asked
        self._flight.land()
        if sample.empty:
            raise self._broken(sample)
        if served.engine.renders:
            remote_prompt.settle(self.attempt, plan, found, sample)
        message, rest = self._parsed(parser, sample)
        await retries.settle(self._service.store, self.attempt, self.request_hash, plan)
        made = Made(
            id=self.id,
            grant=self.grant,
            served=served,
            request=request,
            request_hash=self.request_hash,
            dialect=self._dialect,
            plan=plan,
            index=index,
            tools_hash=tools,
            sampling=params,
            started=started,
        )
        completion = record.completion(made, sample, message, self.followed)
        if completion.finish_reason in ("abort", "error"):
            await self._store(completion)
            raise self._broken(sample)
        if not self.rewritten:
            self.publish(rest)
        await self._store(completion)
        if self.rewritten:
            self.events = unfold(message)
        self.publish([record.finish(completion, sample, served.codec)])

    def _fed(self, parser: StreamParser, ids: list[int]) -> list[Event]:
        try:
            return parser.feed(ids)
        except Exception:  # no parser's fault may cost a sampled token
            log.exception("parser failed", extra=self._ids())
            parser.hold()
            return []

    def _parsed(self, parser: StreamParser, sample: Sample) -> tuple[Message, list[Event]]:
        if sample.message is not None:  # the server's own parse, sent already
            return sample.message, []
        try:
            return parser.finish(sample.stop_matched)
        except Contradiction as e:
            message = e.message
        except Exception:
            log.exception("parser failed", extra=self._ids())
            message = {"role": "assistant", "content": self.served.codec.decode(sample.ids)}
        log.warning("streamed text contradicted", extra=self._ids())
        self._service.metrics.contradictions.inc()
        self.rewritten = bool(self.events)
        return message, unfold(message)

    async def _store(self, completion: Completion) -> None:
        self._storing = True
        try:
            await self._service.store.end(self.grant, self.id, completion, self.attempt)
        except CallError:
            raise  # it is still tried
        except Exception:
            self._storing = False  # nor will it ever be: nobody should wait for it
            raise
        self.node = self.attempt.add(completion)
        self.attempt.failed.discard(self.request_hash)
        if self.node is not None:
            self.node.delivered, self.node.certain = False, True  # until a client has read it to the end
        self._service.metrics.stored(completion)
        if logs.prompts.isEnabledFor(logging.INFO):
            said = {"messages": completion.messages, "response": completion.response}
            logs.prompts.info("conversation", extra={**self._ids(), **said})
        log.info(
            "completion stored",
            extra={
                **self._ids(),
                "finish": completion.finish_reason,
                "sampled": len(completion.sampled_ids),
                "untrainable": completion.untrainable,
                "seconds": round(completion.finished_at - completion.started_at, 3),
            },
        )

    def _replay(self, node: Node) -> None:
        """Give a finished answer again that its client never got to the end of."""
        self._service.metrics.repeats.labels("replayed").inc()
        log.info("answer replayed", extra={**self._ids(), "of": node.id})
        self.id, self.node = node.id, node
        self.prompt_tokens = node.usage[0]
        self.accepted = True
        self.publish([*unfold(node.response), record.finish_again(node, self.served.codec)])

    def _broken(self, sample: Sample) -> CallError:
        if self.attempt.closed:
            return gone()
        if self.cancelled:
            # That its client left says nothing of how the session ends; that the proxy does is no fault of the agent's.
            code = "proxy_stopping" if self._service.draining else "aborted"
            return unavailable(f"the answer was cut off: {self._cancel_reason}", code, 1)
        if sample.end == "abort":
            return unavailable("the inference engine aborted the generation", "engine_aborted", 1)
        return unavailable("the inference engine broke off", "engine_unavailable", 1)

    def _ids(self) -> dict[str, Any]:
        return {"session": self.grant.session_id, "attempt": self.grant.attempt, "completion": self.id}
