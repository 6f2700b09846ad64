"""Decisions: plain state and transitions, synchronous, without trio and without I/O."""
