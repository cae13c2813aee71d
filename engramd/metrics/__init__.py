"""The daemon's counters in the text format that Prometheus scrapes."""
