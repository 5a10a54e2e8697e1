"""What the commands start: one server process or several, under a launcher, and batches of a file."""
