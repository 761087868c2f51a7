"""Acknowledgements that failed because the broker was away are made again.

Celery logs such a failure and forgets it, but the transport goes on counting the message as taken. Once as many are
forgotten as a worker may take, it never asks for another one, and so never notices its lost connection either (seen with
Celery 5.7 on a killed broker: a RUN worker with four slots stood still for good).
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.worker import state

PERIOD = 2.0  # seconds between two looks


class AckAgain(bootsteps.StartStopStep):
    """Consumer bootstep. A message that no request holds, seen twice in a row, is acknowledged again; if that fails, the
    connection error reaches the consumer's loop, which reconnects."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **kwargs: Any):
        super().__init__(parent, **kwargs)
        self._timer: Any = None
        self._suspects: set[str] = set()

    def start(self, parent: Any) -> None:
        self._suspects = set()
        self._timer = parent.timer.call_repeatedly(PERIOD, self._look, (parent,))

    def stop(self, parent: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, consumer: Any) -> None:
        qos = consumer.task_consumer.channel.qos
        taken = set(getattr(qos, "_delivered", ()))
        held = {r.message.delivery_tag for r in list(state.reserved_requests)}
        forgotten = taken - held
        for tag in forgotten & self._suspects:
            qos.ack(tag)
        self._suspects = forgotten
