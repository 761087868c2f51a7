"""Pure functions from the captured completions of an attempt to traces: numpy, no I/O."""
