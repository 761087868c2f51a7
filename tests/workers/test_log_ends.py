"""A log over its limit: its first and last bytes, and how many are missing between them."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from runtimes.output import Output

CHUNKS = st.lists(st.binary(max_size=300), max_size=20)


@given(CHUNKS, st.integers(0, 200), st.integers(0, 600))
@example([b"a" * 300, b"b" * 300], 200, 599)  # barely cut
@example([b"a" * 300, b"b" * 300], 200, 600)  # barely not
@example([b"x" * 9], 200, 8)
def test_a_cut_log_is_as_large_as_allowed_and_accounts_for_every_byte(tmp_path_factory, chunks, limit, log_limit):
    log = tmp_path_factory.mktemp("o") / "log"
    out = Output(limit, log, log_limit)
    for i, c in enumerate(chunks):
        out.feed(c)
        assert log.read_bytes() == b"".join(chunks[: i + 1])[:log_limit]  # live
    out.close()
    out.close()
    whole, kept = b"".join(chunks), log.read_bytes()
    assert len(kept) == min(len(whole), log_limit)
    if kept == whole[:log_limit]:
        # Whole, or no room (or no bytes in memory) for more than the beginning.
        assert len(whole) <= log_limit or not limit or log_limit < 100
        return
    accounts = []
    for m in re.finditer(rb"\n\[(\d+) bytes left out\] *\n", kept):
        head, end = kept[: m.start()], kept[m.end() :]
        accounts.append(
            whole.startswith(head) and whole.endswith(end) and len(head) + int(m[1]) + len(end) == len(whole)
        )
    assert any(accounts) and len(kept) > log_limit - 1


def test_what_the_engine_said_of_a_command_that_never_began_is_forgotten(tmp_path):
    out = Output(100, tmp_path / "log", 8)
    out.feed(b"cannot exec in a deleted state")
    out.forget()
    out.feed(b"here\n")
    out.close()
    assert (out.tail, out.total, (tmp_path / "log").read_bytes()) == (b"here\n", 5, b"here\n")
