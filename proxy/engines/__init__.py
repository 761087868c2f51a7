"""Inference servers behind one small interface."""
