"""The command line: one file a command, and no logic that a library user cannot reach."""
