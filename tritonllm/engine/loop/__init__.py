"""The engine itself: requests in, steps, outputs out; sleep, metrics, beam search."""
