"""A small agent loop for the quickstart: asks the model, writes its answer to a file, checks the form, asks again.

Only the standard library, so that it runs in any sandbox with a Python. The endpoint comes from the environment, as for
every harness that speaks OpenAI Chat Completions.
"""

import json
import os
import re
import sys
import urllib.request

TURNS = 3
# A model of 135M parameters learns the form from examples rather than from the instruction.
EXAMPLES = [
    ("What is the capital of Spain?", "Madrid"),
    ("What is the opposite of up?", "Down"),
    ("How many legs does a dog have?", "Four"),
    ("What colour is the sky?", "Blue"),
]


def ask(messages):
    body = json.dumps({"model": os.environ["POLAR_MODEL"], "messages": messages, "max_tokens": 24}).encode()
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        body,
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


def main():
    task = os.environ["POLAR_INSTRUCTION"]
    messages = [{"role": "system", "content": "Answer with one word."}]
    for question, answer in EXAMPLES:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": task})
    for turn in range(TURNS):
        text = ask(messages)
        print(f"turn {turn + 1}: {text!r}", flush=True)
        with open("answer.txt", "w") as f:
            f.write(text.strip() + "\n")
        if text.strip() and len(re.findall(r"\w+", text)) <= 4:
            return 0
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"Answer with one word. {task}"},
        ]
    return 0


sys.exit(main())
