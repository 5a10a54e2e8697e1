"""Tables of drawing tokens."""
