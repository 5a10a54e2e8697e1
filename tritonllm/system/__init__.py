"""What the package asks of the machine: cores, memory, files that are written whole, logs, the start of a process.

Imports no torch; any room may use it.
"""
