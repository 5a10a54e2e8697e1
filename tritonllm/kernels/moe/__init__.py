"""Mixture of experts: which experts a token takes, and their products."""
