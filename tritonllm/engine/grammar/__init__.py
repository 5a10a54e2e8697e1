"""Structured outputs: schemas, expressions and grammars become masks of tokens. Used by text and loop."""
