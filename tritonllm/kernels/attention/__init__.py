"""Attention over the paged cache, and what writes the cache."""
