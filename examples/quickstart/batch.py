"""The quickstart's tasks: questions that a 135M model sometimes gets right, judged by a test in a fresh sandbox."""

from __future__ import annotations

from importlib.resources import files

from polar.ids import new_id
from polar.task import AgentSpec, EvaluatorSpec, RuntimeSpec, TaskRequest, UploadFile

QUESTIONS = {
    "capital-of-france": ("What is the capital of France?", "paris"),
    "capital-of-italy": ("What is the capital of Italy?", "rome"),
    "opposite-of-hot": ("What is the opposite of hot?", "cold"),
    "colour-of-grass": ("What colour is grass?", "green"),
    "days-in-a-week": ("How many days are in a week?", "7|seven"),
    "two-plus-two": ("What is 2 + 2?", "4|four"),
    "largest-ocean": ("What is the largest ocean on Earth?", "pacific"),
    "planet-we-live-on": ("On which planet do people live?", "earth"),
}

# Exactly the answer, in at most four words: a sentence that happens to contain it fails.
TEST = r"""
import re, sys
text = open("answer.txt").read().lower()
sys.exit(0 if re.search(r"\b(%s)\b", text) and len(re.findall(r"\w+", text)) <= 4 else 1)
"""


def quickstart(samples: int, backend: str) -> list[TaskRequest]:
    agent = files("examples.quickstart").joinpath("agent.py").read_text()
    image = "polar-sandbox:base" if backend in ("docker", "apptainer") else None
    run = new_id("")[-6:]
    return [
        TaskRequest(
            task_id=f"{name}-{run}",
            instruction=question,
            num_samples=samples,
            timeout_seconds=900,
            max_turns=8,
            results_queue=f"quickstart-{run}",
            agent=AgentSpec(harness="shell", command="python3 agent.py"),
            runtime=RuntimeSpec(
                backend=backend,
                image=image,
                prepare=[UploadFile(target="agent.py", content=agent)],
                evaluation_prepare=[],
            ),
            evaluator=EvaluatorSpec(
                name="test_on_output",
                config={
                    "command": "python3 check.py",
                    "collect": ["answer.txt"],
                    "files": [{"target": "check.py", "content": TEST % answer}],
                },
            ),
            labels={"batch": "quickstart"},
        )
        for name, (question, answer) in QUESTIONS.items()
    ]
