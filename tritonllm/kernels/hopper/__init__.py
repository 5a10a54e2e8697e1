"""Gluon pieces that several operations share on Hopper."""
