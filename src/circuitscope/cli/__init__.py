"""The command line: one file per command. Nothing heavy is imported until a command runs."""
