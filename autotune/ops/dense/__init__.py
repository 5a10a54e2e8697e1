"""Tables of products of rows with a weight."""
