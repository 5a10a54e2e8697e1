"""The other ranks of an engine: their processes, under Ray or a launcher, and what runs a step on all of them."""
