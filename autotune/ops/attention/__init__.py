"""Tables of attention over the paged cache, and what writes the cache."""
