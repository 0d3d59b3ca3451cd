"""The command `ddplab`: one module per group of subcommands, and their shared options and output."""
