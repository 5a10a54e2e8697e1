"""Which requests a step computes, and which blocks of the cache they have. Imports no torch."""
