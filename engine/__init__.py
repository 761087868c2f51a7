"""Polar's embedded inference server for machines without a GPU.

It answers SGLang's native HTTP contract (`/generate` with token ids in, token ids and log-probabilities out)
with a dense transformers model on a CPU. `python -m engine --help` starts it; `engine.models.prepare` makes a
model folder; `engine.server.create_app` gives the aiohttp application for use inside another process.
Importing this package imports neither torch nor transformers.
"""
