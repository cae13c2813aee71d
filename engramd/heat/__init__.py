"""Heat: lists of rows worth having in DRAM."""
