"""Version 1 of the protocol: it grows only by optional fields, new methods and new event types."""
