"""Products of rows with a weight, with what comes before and after them in a layer."""
