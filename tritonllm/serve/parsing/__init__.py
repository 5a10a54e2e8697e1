"""Reads the text of an answer: what is a thought, what is said, and which tools are called."""
