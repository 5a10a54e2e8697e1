"""Memory of the paged cache: blocks on the device, their tier on the host, and copies between and within these."""
