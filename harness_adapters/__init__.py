"""One file per agent CLI: pure functions from an agent spec and a model endpoint to a launch plan."""
