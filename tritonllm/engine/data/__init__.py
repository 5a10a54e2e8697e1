"""What the engine's rooms hand to one another: requests, plans, steps, batches, results, outputs."""
