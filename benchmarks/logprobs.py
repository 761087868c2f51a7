"""Do the traces hold the policy's own numbers? `python -m benchmarks.logprobs [--json] [--model M] [--engine URL]`.

Conversations are sampled by token ids from an engine (the embedded one, or any that answers SGLang's `/generate`), captured,
rebuilt, and every log-probability is computed again by a plain forward pass of transformers over the finished traces.

- `exact`: over its traces all captured values must come out again (`max_abs`, `mean_abs` in nats).
- `tree`: the same over the packed tree of each attempt, in one pass with its attention mask and positions.
- `prefix_merging`: each session renders one response in other tokens than were sampled. Per segment, the difference is
  reported; those beyond the tolerance (`differing`) must be just those that are flagged inexact (`flagged`):
  `disagreeing` is empty.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from polar.arrays import floats, ids
from polar.completion import Completion, VersionSpan
from polar.export import rows
from polar.packed import PackedTree
from polar.trace import Trajectory
from reconstruction import exact, prefix_merging, tree_packing

ASKED = (
    "What is a prime number?",
    "Why is that so?",
    "Write it in one line of Python.",
    "Say more about the last step.",
)


@contextlib.contextmanager
def embedded(model: str, folder: Path) -> Iterator[str]:
    """The embedded engine as a process; yields its URL."""
    ready = folder / "engine.url"
    command = [sys.executable, "-m", "engine", "--model", model, "--data-dir", str(folder), "--port-file", str(ready)]
    with (folder / "engine.log").open("wb") as log:
        child = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 240
        while not ready.exists():
            if child.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the engine didn't start: {(folder / 'engine.log').read_text()[-2000:]}")
            time.sleep(0.05)
        yield ready.read_text().strip()
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class Attempts:
    """Samples conversations from an engine, as a capture holds them."""

    def __init__(self, url: str, tokenizer: Any, max_new: int):
        self.url = url
        self.tokenizer = tokenizer
        self.max_new = max_new
        self.end = int(tokenizer.eos_token_id)

    def sample(self, session: int, turns: int, drift_after: int | None) -> list[Completion]:
        """One session of `turns` calls. Each prompt repeats what was sampled; after turn `drift_after`, it is rendered in
        other tokens."""
        out: list[Completion] = []
        prompt = self._encode(f"<|im_start|>user\nSession {session}. {ASKED[0]}<|im_end|>\n<|im_start|>assistant\n")
        for n in range(turns):
            c = self._call(prompt, session, n)
            out.append(c)
            said = c.sampled_ids.tolist()
            if n == drift_after:
                said = self._otherwise(said)
            ended = [] if said and said[-1] == self.end else [self.end]
            asked = f"\n<|im_start|>user\n{ASKED[(n + 1) % len(ASKED)]}<|im_end|>\n<|im_start|>assistant\n"
            prompt = [*prompt, *said, *ended, *self._encode(asked)]
        return out

    def _otherwise(self, said: list[int]) -> list[int]:
        """The same text in other tokens: cut at a place where that makes a difference."""
        body = said[:-1] if said[-1] == self.end else said
        text = self.tokenizer.decode(body, skip_special_tokens=False)
        for cut in range(1, len(text)):
            other = self._encode(text[:cut]) + self._encode(text[cut:])
            if other != body and self.end not in other:
                return [*other, self.end]
        return [*body[1:], self.end]  # nothing to cut: a response that lost its first token

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _call(self, prompt: list[int], session: int, n: int) -> Completion:
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": self.max_new}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            meta = json.load(answer)["meta_info"]
        values = meta["output_token_logprobs"]
        finish = meta["finish_reason"]
        return Completion(
            completion_id=f"s{session}.c{n}",
            session_id=f"check.s{session}",
            attempt=1,
            index=n,
            prompt_tail=ids(prompt),
            sampled_ids=ids([v[1] for v in values]),
            logprobs=floats([v[0] for v in values]),
            versions=[VersionSpan(str(meta.get("weight_version", "")), 0, len(values))],
            finish_reason="stop" if finish["type"] == "stop" else "length",
            stop_matched=finish.get("matched"),
        )


class Plain:
    """The model in transformers, float32, no cache."""

    def __init__(self, folder: Path):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()

    def sequence(self, tokens: np.ndarray) -> np.ndarray:
        """(n,) log-probability of each token after those before it; 0 for the first."""
        return np.append(0.0, self._values(tokens, np.arange(len(tokens) - 1), tokens[1:]))

    def packed(self, tree: PackedTree) -> np.ndarray:
        """The same for every token of a packed tree, each after its own context."""
        torch = self.torch
        mask = torch.where(torch.from_numpy(tree.attention_mask()), 0.0, torch.finfo(torch.float32).min)[None, None]
        positions = torch.from_numpy(tree.positions.astype(np.int64))[None]
        out = np.zeros(len(tree.ids))
        inner = tree.parents >= 0
        out[inner] = self._values(
            tree.ids, tree.parents[inner], tree.ids[inner], attention_mask=mask, position_ids=positions
        )
        return out

    def _values(self, tokens: np.ndarray, at: np.ndarray, of: np.ndarray, **how: Any) -> np.ndarray:
        torch = self.torch
        with torch.inference_mode():
            logits = self.net(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False, **how).logits[
                0
            ]
            values = torch.log_softmax(logits[torch.from_numpy(at.astype(np.int64))], dim=-1)
            return values.gather(1, torch.from_numpy(of.astype(np.int64))[:, None])[:, 0].numpy()


def per_segment(trajectory: Trajectory, plain: Plain) -> list[dict[str, Any]]:
    out = []
    for t in rows(trajectory):
        values = plain.sequence(np.concatenate([t.prompt_ids, t.response_ids]))[len(t.prompt_ids) :]
        off = np.abs(values - t.logprobs)
        for s in t.segments:
            part = off[s.start : s.end]
            out.append({"completion": s.completion_id, "exact": s.exact, "tokens": len(part),
                        "max_abs": float(part.max()), "mean_abs": float(part.mean())})  # fmt: skip
    return out


def summary(segments: list[dict[str, Any]]) -> dict[str, float]:
    tokens = sum(s["tokens"] for s in segments)
    return {
        "segments": len(segments),
        "tokens": tokens,
        "max_abs": max(s["max_abs"] for s in segments),
        "mean_abs": sum(s["mean_abs"] * s["tokens"] for s in segments) / tokens,
    }


def measure(url: str, folder: Path, *, sessions: int, turns: int, max_new: int, tolerance: float) -> dict[str, Any]:
    from transformers import AutoTokenizer

    source, plain = Attempts(url, AutoTokenizer.from_pretrained(folder), max_new), Plain(folder)
    kept, trees, merged = [], [], []
    for n in range(sessions):
        # The first keeps all its tokens, the others drift after one turn each.
        completions = source.sample(n, turns, drift_after=(n - 1) % max(1, turns - 1) if n else None)
        kept += per_segment(exact.build(completions, {}), plain)
        merged += per_segment(prefix_merging.build(completions, {"end_of_turn": [source.end]}), plain)
        packed = tree_packing.build(completions, {}).packed
        assert packed is not None
        off = np.abs(plain.packed(packed) - packed.logprobs)
        trees += [
            {"tokens": c.end - c.start, "max_abs": float(off[c.start : c.end].max()),
             "mean_abs": float(off[c.start : c.end].mean())} for c in packed.calls
        ]  # fmt: skip
    flagged = {s["completion"] for s in merged if not s["exact"]}
    differing = {s["completion"] for s in merged if s["max_abs"] > tolerance}
    return {
        "tolerance": tolerance,
        "exact": summary(kept),
        "tree": summary(trees),
        "prefix_merging": {
            **summary(merged),
            "flagged": len(flagged),
            "differing": len(differing),
            "disagreeing": sorted(flagged ^ differing),
            "per_segment": merged,
        },
    }


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    cli.add_argument("--model", default="tiny-random", help="name for the embedded engine, or a model folder")
    cli.add_argument("--engine", help="URL of an engine that serves this model's folder")
    cli.add_argument("--sessions", type=int, default=4)
    cli.add_argument("--turns", type=int, default=4)
    cli.add_argument("--max-new", type=int, default=24, help="sampled tokens per turn")
    cli.add_argument("--tolerance", type=float, default=1e-3, help="nats; engines in bfloat16 need more")
    options = cli.parse_args()
    with tempfile.TemporaryDirectory(prefix="lp") as name, contextlib.ExitStack() as stack:
        folder = Path(options.model)
        if not folder.is_dir():
            from engine.models import prepare

            folder = prepare(options.model, Path(name))
        url = options.engine or stack.enter_context(embedded(str(folder), Path(name)))
        result = {"model": options.model} | measure(
            url, folder, sessions=options.sessions, turns=options.turns, max_new=options.max_new, tolerance=options.tolerance
        )  # fmt: skip
    if options.json:
        print(json.dumps(result))
    else:
        for builder in ("exact", "tree", "prefix_merging"):
            print(builder, *(f"{k} {v:.3g}" for k, v in result[builder].items() if isinstance(v, int | float)))
        for s in result["prefix_merging"]["per_segment"]:
            print(
                f"  {s['completion']:8} {'exact' if s['exact'] else 'INEXACT':8} max {s['max_abs']:.2e} mean {s['mean_abs']:.2e}"
            )
        print("disagreeing:", result["prefix_merging"]["disagreeing"] or "none")
    off = max(result["exact"]["max_abs"], result["tree"]["max_abs"])
    return 1 if off > options.tolerance or result["prefix_merging"]["disagreeing"] else 0


if __name__ == "__main__":
    sys.exit(main())
