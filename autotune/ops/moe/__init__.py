"""Tables of mixture of experts."""
