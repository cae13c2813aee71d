"""Synthetic checkpoints and sparse packed tables, whose rows anybody can compute. See docs/table_format.md."""
