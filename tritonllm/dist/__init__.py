"""Several processes that compute one model: their collectives, and what joins and watches them."""
