"""`make hostile`: every attack in every sandbox that this machine has, and without protection for comparison."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.hostile.arena import Arena, missing
from tests.hostile.attacks import ATTACKS


def main() -> int:
    won: set[str] = set()
    would: set[str] = set()
    places = [b for b in ("local", "docker") if not (why := missing(b)) or print(f"-- {b}: {why}")]
    with tempfile.TemporaryDirectory(prefix="polar-hostile-", ignore_cleanup_errors=True) as folder:
        for backend in places:
            arena = Arena(backend, Path(folder) / backend)
            bare, kept = arena.unprotected(), arena.protected()
            print(f"\n{backend}: attack | without protection | with it")
            for a in ATTACKS:
                print(f"  {'WON ' if kept[a.name][0] else 'held'}  {a.name} | {'wins' if bare[a.name][0] else 'fails'}: "
                      f"{bare[a.name][1]} | {kept[a.name][1]}")  # fmt: skip
            won |= {n for n, (w, _) in kept.items() if w}
            would |= {n for n, (w, _) in bare.items() if w}
    print(f"\nwithout protection: attacks: {len(ATTACKS)}, wins: {len(would)}")
    print(f"attacks: {len(ATTACKS) if places else 0}, wins: {len(won)}")
    return 1 if won or not places else 0


if __name__ == "__main__":
    sys.exit(main())
