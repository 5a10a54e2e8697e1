"""Blocks of the cache that engines share: connectors to a folder, to other processes and to other machines."""
