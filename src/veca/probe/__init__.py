"""Probes: what a frozen backbone knows, at every budget."""
