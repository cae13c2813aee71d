"""Measurements beside their limits: a private daemon, the plain gather, requests by ticket, reports with ratios."""
