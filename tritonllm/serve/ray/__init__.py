"""The server as an application of Ray Serve, and batches over Ray."""
