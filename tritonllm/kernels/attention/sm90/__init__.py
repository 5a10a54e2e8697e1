"""Attention in Gluon, for Hopper. A file imports it only where it launches it: Gluon is not there for every GPU."""
