"""The exercises, filled in."""
