"""The Celery application: queues, settings, and sending of hints.

A message says only that there may be work for a session; the store decides. So nothing here tries to make delivery
exact: duplicates are no-ops and lost messages are sent again by the reaper.
"""

from __future__ import annotations

import logging

from celery import Celery

from polar.config import Settings
from polar.store.connection import for_celery
from polar.store.sessions import Hint
from workers.acks import AckAgain

log = logging.getLogger("polar.hints")

TASKS = {"init": "polar.init", "run": "polar.run", "postrun": "polar.postrun", "cleanup": "polar.cleanup"}


def queue_for(stage: str, node: str = "") -> str:
    return f"{stage}.{node}" if node else stage


def make_app(settings: Settings) -> Celery:
    broker, transport = for_celery(settings.broker)
    app = Celery("polar", broker=broker)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_track_started=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        # A worker takes no more than it works on: what waits should wait in the queue, where any worker can take it.
        task_acks_late=True,
        worker_prefetch_multiplier=1,
        task_acks_on_failure_or_timeout=True,
        task_reject_on_worker_lost=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_pool_limit=16,
        worker_enable_remote_control=False,
        broker_transport_options={
            # A redelivery is only a second, needless hint; recovery rests on leases. It must still outlast most stages.
            "visibility_timeout": 3600,
            "global_keyprefix": f"{settings.namespace}:celery:",
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": not broker.startswith("redis+socket"),
            "health_check_interval": 10,
            "unacked_mutex_expire": 10,
            **transport,
        },
    )
    app.steps["consumer"].add(AckAgain)
    return app


def send(app: Celery, hints: list[Hint]) -> None:
    """Announce work. A failure is logged, not raised: the reaper announces it again."""
    for h in hints:
        try:
            app.send_task(TASKS[h.stage], args=[h.session_id], queue=h.queue, retry=False)
        except Exception as e:  # any transport error
            log.warning("hint for %s to %s not sent: %s", h.session_id, h.queue, e)
