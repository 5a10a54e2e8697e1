"""Products of experts in Gluon, for Hopper. A file imports them only where it launches them: Gluon is not there for
every GPU."""
