"""One generation: from a linked prompt to a stored completion. Any number of clients may listen to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from polar import arrays
from polar.completion import Completion, FinishReason
from polar.ids import new_id
from polar.store.capture import Grant
from proxy import linking, logs, remote_prompt, retries, sampling
from proxy.attempt import Attempt, Node
from proxy.codec import PROMPT_TAIL
from proxy.engines.base import Order, Sample
from proxy.failures import CallError, gone, overflow, unavailable
from proxy.linking import Match, Plan
from proxy.neutral import Event, Finish, Message, Request, Usage, unfold
from proxy.stream_parser import Contradiction, StreamParser
from proxy.table import Served

if TYPE_CHECKING:
    from proxy.service import Service

log = logging.getLogger("polar.proxy")

# A retry waits for the end of what it retries: then it is known whether it repeats, replays or continues.
_WAIT_FOR_ABORTED = 5.0
_CHARS_PER_TOKEN = 32  # more than any text has on average


class Generation:
    """`events` grows until `done`; then either the last one is a Finish or `error` says what went wrong. `rewritten` is
    set when the events were replaced after some had been sent: whoever has sent one must break off."""

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
        self.id = new_id("c")
        self.grant, self.served, self.attempt, self.request = grant, served, attempt, request
        self.request_hash = request_hash
        self.events: list[Event] = []
        self.error: CallError | None = None
        self.done = False
        self.ended = asyncio.Event()
        self.after: Generation | None = None  # an aborted one of the same request, still being stored
        self.accepted = False
        self.rewritten = False
        self.created = time.time()
        self.node: Node | None = None
        self.prompt_tokens = 0
        self.waited = 0.0  # seconds that others took: engine, pauses
        self._service, self._dialect = service, dialect
        self._cancel = asyncio.Event()
        self._cancel_reason = ""
        self._changed: asyncio.Future[None] | None = None
        self._listeners = 0
        self._registered = False
        self._storing = False

    # Listening -------------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        self._listeners += 1

    def leave(self) -> None:
        """A client is served or gone. When the last one goes before the end, nobody wants the rest."""
        self._listeners -= 1
        if self._listeners <= 0 and not self.done:
            self.cancel("client went away")

    def cancel(self, reason: str) -> None:
        if not self.done and not self._cancel.is_set():
            self._cancel_reason = reason
            self._cancel.set()
            self._service.metrics.aborted(reason)
            log.info("generation aborted", extra={**self._ids(), "why": reason})

    @property
    def cancelled(self) -> bool:
        return self._cancel.is_set()

    def delivered(self) -> None:
        """A client got the whole answer."""
        if self.node is not None and not (self.node.delivered and self.node.certain):
            self.node.delivered = self.node.certain = True
            self._service.store.delivered(self.attempt.id, self.node.id)

    async def change(self, seen: int, timeout: float) -> bool:
        """Wait until there are more than `seen` events or it is done; False at the timeout."""
        if len(self.events) > seen or self.done:
            return True
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._changed}, timeout=timeout)
        return len(self.events) > seen or self.done

    def accept(self) -> None:
        """The engine has the request: nothing but a broken stream can tell its clients of a failure from here on."""
        self.accepted = True
        self._notify()

    def _publish(self, events: list[Event]) -> None:
        if events:
            self.events += events
            self._notify()

    def _notify(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    # Running ---------------------------------------------------------------------------------------------------------

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
                await self._service.store.note(self.grant, self.error)
            self.done = True
            self.ended.set()
            if self.attempt.generations.get(self.request_hash) is self:
                del self.attempt.generations[self.request_hash]
            self._notify()

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
        """Plan, begin, sample. False: another proxy has stored something that the plan should have known."""
        store, request, attempt, served = self._service.store, self.request, self.attempt, self.served
        digests = attempt.read(request.messages)
        tools = linking.tools_hash(request)
        found = linking.match(attempt, request, digests, self.request_hash, tools, served.key)
        latest = found.latest
        if latest is not None and await retries.wants_again(store, attempt, request, self.request_hash, latest):
            await store.check_open(self.grant)
            self._replay(latest)
            return True
        self._refuse_hopeless()
        if served.engine.renders:
            plan = await remote_prompt.plan(attempt, served.codec, request, digests, found)
        else:
            plan = await linking.plan(attempt, served.codec, request, digests, found, tools, served.key)
        self.prompt_tokens = len(plan.prompt)
        room = served.row.context_length - len(plan.prompt)
        if room < 1:
            await store.check_open(self.grant)
            raise overflow(len(plan.prompt), served.row.context_length)
        if not self._service.pauses.free(served.key):
            await store.check_open(self.grant)
            held = time.monotonic()
            await self._service.pauses.wait(served.key, self._cancel)
            self.waited += time.monotonic() - held
            if self.cancelled:
                raise self._broken(Sample())
        self._flight = self._service.pauses.begin(served.key)
        try:
            return await self._begun(plan, found, tools, room)
        finally:
            self._flight.land()

    async def _begun(self, plan: Plan, found: Match, tools: str, room: int) -> bool:
        index, news = await self._service.store.begin(self.grant, self.id, self.attempt)
        self._registered = index >= 0
        if news:
            return False
        log.debug(
            "generation begun", extra={**self._ids(), "index": index, "link": plan.link, "prompt": len(plan.prompt)}
        )
        await self._sample(plan, found, index, tools, room)
        return True

    def _refuse_hopeless(self) -> None:
        """Text that can't fit is not worth tokenising: it would only keep the others waiting."""
        size = sum(len(m["content"]) for m in self.request.messages)
        if size > self.served.row.context_length * _CHARS_PER_TOKEN:
            raise overflow(size // _CHARS_PER_TOKEN, self.served.row.context_length)

    async def _sample(self, plan: Plan, found: Match, index: int, tools: str, room: int) -> None:
        """Sample, store, publish. Raises CallError if there is no whole answer."""
        request, served = self.request, self.served
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
            tokens=lambda ids: self._publish(self._fed(parser, ids)),
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
            events=self._publish,
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
        completion = self._completion(plan, index, tools, params, sample, message, started)
        if completion.finish_reason in ("abort", "error"):
            await self._store(completion)
            raise self._broken(sample)
        if not self.rewritten:
            self._publish(rest)
        await self._store(completion)
        if self.rewritten:
            self.events = unfold(message)
        self._publish([self._finish(completion, sample)])

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

    def _completion(
        self, plan: Plan, index: int, tools: str, params: dict[str, Any], s: Sample, message: Message, started: float
    ) -> Completion:
        request, parent = self.request, plan.parent
        reason: FinishReason = "stop"
        if s.end in ("length", "abort"):
            reason = "length" if s.end == "length" else "abort"
        elif s.end == "failed":
            reason = "error"
        elif message.get("tool_calls"):
            reason = "tool_calls"
        return Completion(
            completion_id=self.id,
            session_id=self.grant.session_id,
            attempt=self.grant.attempt,
            index=index,
            parent_id=parent.id if parent is not None else None,
            link=plan.link,
            link_reason=plan.reason,
            prompt_shared=plan.shared,
            prompt_tail=plan.prompt[plan.shared :],
            sampled_ids=arrays.ids(s.ids),
            logprobs=arrays.floats(s.logprobs),
            versions=s.versions,
            untrainable=s.untrainable,
            finish_reason=reason,
            stop_matched=s.stop_matched,
            sampling=params,
            requested_sampling=request.wishes,
            model=self.served.key,
            engine=self.served.engine.name,
            dialect=self._dialect,
            stream=request.stream,
            role=plan.role,
            labels=self.request.labels,
            request_hash=self.request_hash,
            delivered=self._listeners > 0 and not self.cancelled,
            message_shared=plan.message_shared,
            messages=linking.stored_messages(request, plan),
            tools_hash=tools,
            tools=[] if parent is not None and parent.tools_hash == tools else request.tools,
            response=message,
            cached_tokens=s.cached_tokens,
            started_at=started,
            first_token_at=s.first_token_at,
            finished_at=time.time(),
        )

    async def _store(self, completion: Completion) -> None:
        self._storing = True
        await self._service.store.end(self.grant, self.id, completion, self.attempt)
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

    def _finish(self, c: Completion, s: Sample) -> Finish:
        usage = Usage(
            prompt_tokens=c.prompt_length or s.prompt_tokens,
            sampled_tokens=len(c.sampled_ids) or s.sampled_tokens,
            cached_tokens=c.cached_tokens,
            reasoning_tokens=self.served.codec.reasoning_tokens(c.sampled_ids.tolist(), c.response),
        )
        matched = c.stop_matched if isinstance(c.stop_matched, str) else None
        return Finish(reason=c.finish_reason, usage=usage, stop_sequence=matched)  # type: ignore[arg-type]

    def _replay(self, node: Node) -> None:
        """Give a finished answer again that its client never got to the end of."""
        self._service.metrics.repeats.labels("replayed").inc()
        log.info("answer replayed", extra={**self._ids(), "of": node.id})
        self.id, self.node = node.id, node
        prompt, sampled, cached = node.usage
        self.prompt_tokens = prompt
        reasoning = self.served.codec.reasoning_tokens(node.sampled.tolist(), node.response)
        usage = Usage(prompt_tokens=prompt, sampled_tokens=sampled, cached_tokens=cached, reasoning_tokens=reasoning)
        matched = node.stop_matched if isinstance(node.stop_matched, str) else None
        finish = Finish(reason=node.finish_reason, usage=usage, stop_sequence=matched)  # type: ignore[arg-type]
        self.accepted = True
        self._publish([*unfold(node.response), finish])

    def _broken(self, sample: Sample) -> CallError:
        if self.attempt.closed:
            return gone()
        if self.cancelled:
            return unavailable(f"the answer was cut off: {self._cancel_reason}", "aborted", 1)
        if sample.end == "abort":
            return unavailable("the inference engine aborted the generation", "engine_aborted", 1)
        return unavailable("the inference engine broke off", "engine_unavailable", 1)

    def _ids(self) -> dict[str, Any]:
        return {"session": self.grant.session_id, "attempt": self.grant.attempt, "completion": self.id}
