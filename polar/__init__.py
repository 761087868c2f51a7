"""Polar: reinforcement learning rollouts inside the agent harness that will use the model."""

__version__ = "0.1.0"
