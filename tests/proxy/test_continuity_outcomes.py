"""The outcome, its reason, and the right parent, for everything that harnesses do to a history."""

from __future__ import annotations

import json

import pytest

from tests.proxy.neutral_session import TOOLS, NeutralSession, call, result, system, user

SYSTEM = system("You are a careful agent. Look at the box and tell what is inside.")


@pytest.fixture
def session(codec) -> NeutralSession:
    return NeutralSession(codec)


async def three_turns(session) -> tuple[list, list]:
    """(history with two tool turns and a text turn, completions)."""
    history = [SYSTEM, user("List.")]
    stored = []
    for says in (f"<think>\nHm.\n</think>\n\n{call(command='ls')}", call("read", path="a"), "All seen."):
        turn, c = await session.ask(history, says)
        stored.append(c)
        history += [turn, *([result(turn, f"out of {says}")] if turn.get("tool_calls") else [user("And?")])]
    assert [c.link for c in stored] == ["first", "continued", "continued"]
    return history, stored


async def test_the_ordinary_next_turn(session):
    history, stored = await three_turns(session)
    _, c = await session.ask(history)
    assert (c.link, c.link_reason, c.parent_id) == ("continued", "", stored[-1].completion_id)


async def test_reasoning_dropped_by_the_harness(session):
    history, stored = await three_turns(session)
    bare = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in history]
    assert bare != history
    _, c = await session.ask(bare)
    assert (c.link, c.parent_id) == ("continued", stored[-1].completion_id)


async def test_reasoning_of_an_earlier_turn_edited(session):
    history, _stored = await three_turns(session)
    history[2] = {**history[2], "reasoning_content": "Something else."}
    turn, c = await session.ask(history, "Hm.")
    assert c.link == "rewritten" and "message 2" in c.link_reason
    # What follows the rewritten prompt goes on from there: it isn't rendered anew for ever.
    _, d = await session.ask([*history, turn, user("Next.")])
    assert (d.link, d.parent_id) == ("continued", c.completion_id)


@pytest.mark.parametrize("blank", [False, True])
async def test_an_edited_tool_result(session, blank):
    history, stored = await three_turns(session)
    edited = [dict(m) for m in history]
    edited[3]["content"] = "" if blank else "[old tool result cleared]"
    turn, c = await session.ask(edited, "Hm.")
    assert c.link == "rewritten" and c.link_reason.startswith("message 3 (tool)")
    assert (c.message_shared, c.parent_id) == (3, stored[0].completion_id)
    _, d = await session.ask([*edited, turn, user("Next.")])
    assert (d.link, d.parent_id) == ("continued", c.completion_id)
    # The branch that was not edited is still there.
    _, e = await session.ask(history)
    assert (e.link, e.parent_id) == ("continued", stored[-1].completion_id)


async def test_results_that_changed_places(session):
    history = [SYSTEM, user("Both.")]
    turn, _first = await session.ask(history, f"{call(command='a')}\n{call(command='b')}")
    one, two = result(turn, "x", 0), result(turn, "x", 1)
    answer, second = await session.ask([*history, turn, one, two], "Good.")
    assert second.link == "continued"
    _, c = await session.ask([*history, turn, two, one, answer, user("Next.")])
    assert c.link == "rewritten" and c.link_reason.startswith("message 3 (tool)")


async def test_a_deleted_assistant_turn_in_the_middle(session):
    history, _stored = await three_turns(session)
    turn, c = await session.ask(history, call(command="ls"))
    history += [turn, result(turn)]
    _, c = await session.ask([*history[:4], *history[6:]])
    assert c.link == "rewritten" and c.link_reason.startswith("message 4 (assistant)")
    _, c = await session.ask([*history[:2], *history[4:]])
    assert c.link == "rewritten" and c.link_reason.startswith("message 2 (assistant)")
    _, c = await session.ask([*history[:2], *history[6:]])
    assert c.link == "rewritten" and c.link_reason.startswith("message 2 (assistant)")


async def test_the_last_assistant_turn_deleted(session):
    """mini-swe-agent removes an answer that it can't use and says what was wrong with it."""
    history, stored = await three_turns(session)
    _turn, _bad = await session.ask(history, "No tool call.")
    wrong = [*history, user("Format error: call a tool.")]
    _, c = await session.ask(wrong, "Better.")
    assert (c.link, c.parent_id) == ("continued", stored[-1].completion_id), "as if it had never been said"
    # The very first answer: there is no earlier one to go on from.
    fresh = NeutralSession(session.codec)
    await fresh.ask(history[:2], "No tool call.")
    _, c = await fresh.ask([*history[:2], user("Format error.")])
    assert c.link == "rewritten" and c.link_reason == "the answer after message 2 was left out"


async def test_compaction(session):
    """The summary is asked for in the conversation; then a new one begins with it."""
    history, _stored = await three_turns(session)
    _turn, asked = await session.ask([*history, user("Summarise.")], "Listed and read.")
    assert asked.link == "continued"
    compacted = [SYSTEM, user("Summary: listed and read.")]
    answer, c = await session.ask(compacted, call(command="pwd"))
    assert (c.link, c.link_reason) == ("new_chain", "no assistant turn in the request")
    _, d = await session.ask([*compacted, answer, result(answer)])
    assert (d.link, d.parent_id) == ("continued", c.completion_id)
    # With some recent turns kept behind the summary: ids say where they are from.
    _, e = await session.ask([SYSTEM, user("Summary: listed."), *history[4:6]])
    assert e.link == "rewritten" and e.link_reason.startswith("message 1 (user)")


async def test_subagents_interleaving(session):
    """Three conversations of one session, two of them beginning alike, in every order."""
    chats = {
        "main": [SYSTEM, user("Do it.")],
        "a": [system("You search."), user("Find.")],
        "b": [system("You search."), user("Find."), user("In b.")],
    }
    last: dict[str, str] = {}
    for n, name in enumerate(["main", "a", "b", "a", "main", "b", "b", "a", "main", "main", "a"]):
        turn, c = await session.ask(chats[name], call(command="ls"))  # the same text from all of them
        if name in last:
            assert (c.link, c.parent_id) == ("continued", last[name])
        else:
            assert c.link in ("first", "new_chain", "rewritten")
        last[name] = c.completion_id
        chats[name] += [turn, result(turn, "same" if n % 2 else name)]


async def test_a_title_call(session):
    history, stored = await three_turns(session)
    _, title = await session.ask([system("You give titles."), user("List.")], "Boxes.", tools=[])
    assert (title.link, title.role) == ("new_chain", "auxiliary")
    _, c = await session.ask(history)
    assert (c.link, c.parent_id) == ("continued", stored[-1].completion_id)


async def test_the_model_changes(session):
    history, _stored = await three_turns(session)
    turn, c = await session.ask(history, "Hm.", model="teacher")
    assert (c.link, c.link_reason, c.parent_id) == ("rewritten", "model changed", None)
    history += [turn, user("Next.")]
    _, d = await session.ask(history, model="teacher")
    assert (d.link, d.parent_id) == ("continued", c.completion_id)
    _, e = await session.ask(history, model="policy")
    assert (e.link, e.link_reason) == ("rewritten", "model changed")


async def test_tools_change(session):
    history, _ = await three_turns(session)
    _, c = await session.ask(history, tools=TOOLS[:1])
    assert (c.link, c.link_reason) == ("rewritten", "tools changed")
    _, c = await session.ask([*history, user("More.")], tools=TOOLS[::-1])
    assert (c.link, c.link_reason) == ("rewritten", "the order of the tools changed")


async def test_the_system_prompt_changes(session):
    history, _stored = await three_turns(session)
    other = system("Today is Monday.")
    _, c = await session.ask([other, *history[1:]])
    assert (c.link, c.link_reason) == ("rewritten", "the system prompt was edited, added or left out")
    _, c = await session.ask(history[1:-2])
    assert c.link == "rewritten"


async def test_a_system_message_in_the_middle_belongs_to_its_place(session):
    history, stored = await three_turns(session)
    late = [*history, system("Hurry.")]
    turn, c = await session.ask(late, "Yes.")
    assert (c.link, c.parent_id) == ("continued", stored[-1].completion_id)
    _, d = await session.ask([*late, turn, user("Next.")])
    assert d.link == "continued"
    _, e = await session.ask([*history, turn, user("Next.")])
    assert e.link == "rewritten"


async def test_the_same_request_again(session):
    history, stored = await three_turns(session)
    _one, _a = await session.ask(history, "Same.")
    _two, b = await session.ask(history, "Same.")
    assert (b.link, b.parent_id) == ("sibling", stored[-1].completion_id)
    assert b.link_reason == "the same request again after its answer"


async def test_equal_siblings_are_told_apart_by_refs_else_the_latest_delivered_is_meant(session):
    history = [SYSTEM, user("Say it.")]
    said = [await session.ask(history, "Same.", delivered=d) for d in (True, True, False)]
    (turn, a), (_, b), (_, lost) = said
    follow = user("Next.")
    for n, (refs, parent) in enumerate(
        [([a.completion_id], a), ([b.completion_id], b), ([lost.completion_id], lost), ([], b), (["c-unknown"], b)]
    ):
        _, c = await session.ask([*history, {**turn, "refs": refs}, follow, user(str(n))])
        assert (c.link, c.parent_id) == ("continued", parent.completion_id)


async def test_equal_siblings_are_told_apart_by_their_reasoning(session):
    history = [SYSTEM, user("Say it.")]
    a, ca = await session.ask(history, "<think>\nOne way.\n</think>\n\nSame.")
    b, cb = await session.ask(history, "<think>\nAnother.\n</think>\n\nSame.")
    for turn, c in ((a, ca), (b, cb)):
        _, d = await session.ask([*history, turn, user("Next.")])
        assert (d.link, d.parent_id) == ("continued", c.completion_id)


async def test_ids_of_another_branch_cost_a_full_render(session):
    """A ref or call id may be wrong or forged: what the other branch saw never gets into this prompt."""
    _history, stored = await three_turns(session)
    other = [system("Secret."), user("Other.")]
    secret, c = await session.ask(other, call(command="ls"))
    honest, d = await session.ask([SYSTEM, user("Mine.")], call(command="ls"))
    for n, lie in enumerate(
        [
            {**honest, "tool_calls": secret["tool_calls"]},
            {**honest, "tool_calls": secret["tool_calls"], "refs": [stored[0].completion_id]},
        ]
    ):
        _, e = await session.ask([SYSTEM, user("Mine."), lie, result(lie, f"x{n}")])
        text = session.codec.decode(session.attempt.prompt(session.node(e)).tolist())
        assert e.link == "rewritten" and "Secret" not in text
    # Several, one of them right: the right one.
    both = {**honest, "refs": [c.completion_id]}
    _, e = await session.ask([SYSTEM, user("Mine."), both, result(both, "y")])
    assert (e.link, e.parent_id) == ("continued", d.completion_id)
    # Garbage.
    junk = {**honest, "refs": [None, 7, {"a": 1}, "x" * 100_000, *map(str, range(1000))]}
    _, e = await session.ask([SYSTEM, user("Mine."), junk, result(junk, "z")])
    assert (e.link, e.parent_id) == ("continued", d.completion_id)


async def test_ids_of_another_model_cost_a_full_render(session):
    history = [SYSTEM, user("Say it.")]
    turn, a = await session.ask(history, "Same.", model="teacher")
    _, c = await session.ask([*history, {**turn, "refs": [a.completion_id]}, user("Next.")])
    assert (c.link, c.link_reason, c.parent_id) == ("rewritten", "model changed", None)


async def test_call_ids_that_the_model_made_up_may_repeat(session):
    """Some formats number their calls in every turn anew: the same ids all over the session."""
    history = [SYSTEM, user("Go.")]
    for n in range(80):
        turn, c = await session.ask(history, call(command="ls"), prefix="run")
        assert turn["tool_calls"][0]["id"] == "run_0" and c.link == ("continued" if n else "first")
        history += [turn, result(turn, "same")]
    other = [SYSTEM, user("Go elsewhere.")]
    for n in range(3):
        turn, c = await session.ask(other, call(command="ls"), prefix="run")
        assert c.link == ("continued" if n else "new_chain")
        other += [turn, result(turn, "same")]
    _, c = await session.ask([*history[:10], user("From an early one.")])
    assert (c.link, c.parent_id) == ("continued", "c-3")


async def test_call_ids_of_the_harness_own(session):
    """Some clients give every call an id of their own, always the same for one call."""
    history = [SYSTEM, user("Go.")]
    for n in range(3):
        turn, c = await session.ask(history, f"{call(command='a')}\n{call(command='b')}")
        assert c.link == ("continued" if n else "first")
        own = {**turn, "tool_calls": [{**k, "id": f"x{n}{i}"} for i, k in enumerate(turn["tool_calls"])]}
        history += [own, result(own, "1", 0), result(own, "2", 1)]


async def test_a_request_that_ends_with_an_assistant_turn(session):
    history, _stored = await three_turns(session)
    _, c = await session.ask(history[:-1])
    assert (c.link, c.link_reason) == ("rewritten", "the request ends with an assistant turn")


async def test_a_turn_that_was_cut_off_is_closed(session):
    history = [SYSTEM, user("Go.")]
    turn, a = await session.ask(history, "The quick brown", end=False)
    _, b = await session.ask([*history, turn, user("Continue.")])
    assert (b.link, b.parent_id) == ("continued", a.completion_id)
    assert b.prompt_shared == a.prompt_length + len(a.sampled_ids)


async def test_two_hundred_turns_stay_one_chain_in_linear_space(session):
    history = [SYSTEM, user("Go.")]
    for n in range(200):
        turn, c = await session.ask(history, call(command=f"step {n}") if n % 5 else f"Step {n}.")
        assert c.link == ("continued" if n else "first")
        history += [turn, result(turn, f"out {n}") if turn.get("tool_calls") else user(f"next {n}")]
    tails = [len(c.prompt_tail) for c in session.stored[1:]]
    assert max(tails) < 60 and all(len(c.messages) == 1 for c in session.stored[1:])
    assert len(json.dumps([c.messages for c in session.stored])) < 40_000
