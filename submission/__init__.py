"""From a task to sessions in the store: validation, uploads, submission. Shared by the CLI and the control plane."""

from submission.submit import submit
from submission.validate import validate

__all__ = ["submit", "validate"]
