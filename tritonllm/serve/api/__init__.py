"""The HTTP API: bodies and their fields, one file for each group of paths, the application."""
