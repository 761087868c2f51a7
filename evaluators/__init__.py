"""Judges of an attempt's outcome, one file each."""
