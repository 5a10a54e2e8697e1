"""Which tokens of a draft a target model keeps, and the token that follows them."""
