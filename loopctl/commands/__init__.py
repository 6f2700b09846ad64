"""One module per command, or per group of small ones."""
