"""The command line: one module per command, each with a `command`. Signals live here only."""
