"""One step on one rank: from a plan to a batch, through graph or model, to tokens."""
