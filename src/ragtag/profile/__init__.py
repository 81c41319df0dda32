"""Measuring devices and links: loops over small callables, and the pure statistics they need."""
