"""The session daemon: one long-running process per user that owns the conversations with coding agents."""

__version__ = "0.1.0"
