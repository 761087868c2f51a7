"""A pause that several ask for: whoever was told that it holds may rely on it, whatever becomes of the others."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.pausing import DrainTimeout, PauseRequest, Pauses, ResumeRequest


def wait(pauses: Pauses, timeout: float = 600, lease: float = 600) -> asyncio.Task:
    return asyncio.create_task(pauses.pause(PauseRequest(timeout_seconds=timeout, lease_seconds=lease)))


async def hold(pauses: Pauses, lease: float = 600) -> dict:
    return await pauses.pause(PauseRequest(mode="hold", lease_seconds=lease))


def shown(pauses: Pauses) -> dict:
    return pauses.state()["models"]["m"]


async def gone(task: asyncio.Task) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def until_draining(pauses: Pauses, n: int) -> None:
    async with asyncio.timeout(10):
        while sum(p.drains for p in pauses._pauses.values()) != n:
            await asyncio.sleep(0)


@pytest.fixture
def pauses():
    return Pauses(["m"])


@pytest.mark.parametrize("how", ["timeout", "caller gone"])
async def test_a_failed_drain_leaves_anothers_pause(pauses, how):
    flight = pauses.begin("m")
    drain = wait(pauses, timeout=0.05 if how == "timeout" else 600)
    await until_draining(pauses, 1)
    mine = (await hold(pauses))["models"]["m"]
    if how == "timeout":
        with pytest.raises(DrainTimeout):
            await drain
    else:
        await gone(drain)
    kept = shown(pauses)
    assert kept["paused"] and kept["pause_id"] == mine["pause_id"] and not kept["draining"]
    assert kept["lease_seconds_left"] > 500
    flight.land()


async def test_what_is_interrupted_goes_on_while_anybody_drains(pauses):
    flight = pauses.begin("m")
    drain = wait(pauses)
    await until_draining(pauses, 1)
    await hold(pauses)
    assert shown(pauses)["draining"]
    await asyncio.wait_for(pauses.again("m", asyncio.Event()), 10)
    flight.land()
    await drain
    held = asyncio.create_task(pauses.again("m", asyncio.Event()))
    await asyncio.sleep(0)
    assert shown(pauses)["held"] == 1
    pauses.resume(ResumeRequest())
    await held


async def test_two_drains_end_apart(pauses):
    flight = pauses.begin("m")
    first, second = wait(pauses), wait(pauses)
    await until_draining(pauses, 2)
    await gone(first)
    assert shown(pauses)["paused"] and shown(pauses)["draining"]
    flight.land()
    assert (await second)["models"]["m"]["lease_seconds_left"] > 500
    assert not shown(pauses)["draining"]


async def test_nobody_shortens_anothers_lease(pauses):
    await hold(pauses, lease=600)
    await hold(pauses, lease=1)
    await wait(pauses, lease=1)
    assert shown(pauses)["lease_seconds_left"] > 500


async def test_a_lease_that_runs_out_while_another_drains_is_the_drains(pauses):
    flight = pauses.begin("m")
    await hold(pauses, lease=0.01)
    drain = wait(pauses)
    await until_draining(pauses, 1)
    async with asyncio.timeout(10):
        while shown(pauses)["lease_seconds_left"]:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)  # its timer is over
    assert shown(pauses)["paused"]
    await gone(drain)
    assert not shown(pauses)["paused"]
    flight.land()


STEPS = st.lists(st.sampled_from(["begin", "land", "wait", "wait", "leave", "hold", "resume"]), max_size=25)


@given(STEPS, st.data())
def test_any_order(steps, data):
    asyncio.run(_walk(steps, data))


async def _walk(steps: list[str], data: st.DataObject) -> None:
    """A model that counts: the pause is there while somebody drains or was told so, and it is always the one that was told."""
    pauses, flights, drains = Pauses(["m"]), [], []
    told = ""  # the id of the pause that somebody relies on
    for step in steps:
        if step == "begin" and pauses.free("m"):
            flights.append(pauses.begin("m"))
        elif step == "land" and flights:
            flights.pop(data.draw(st.integers(0, len(flights) - 1))).land()
        elif step == "wait":
            drains.append(wait(pauses))
        elif step == "leave" and drains:
            await gone(drains.pop(data.draw(st.integers(0, len(drains) - 1))))
        elif step == "hold":
            told = (await hold(pauses))["models"]["m"]["pause_id"]
        elif step == "resume":
            pauses.resume(ResumeRequest())
            told = ""
            for drain in drains:  # theirs was ended, of which they would be told when they have drained
                await gone(drain)
            drains = []
        if flights:
            await until_draining(pauses, len(drains))
        else:
            for state in await asyncio.gather(*drains):
                told = state["models"]["m"]["pause_id"]
            drains = []
        now = shown(pauses)
        assert now["paused"] == bool(told or drains) and now.get("draining", False) == bool(drains)
        assert not told or now["pause_id"] == told
        assert now["in_flight"] == len(flights)
    for drain in drains:
        await gone(drain)
    assert shown(pauses)["paused"] == bool(told)
    pauses.close()
