"""Which tracks a trace has: processes and threads of Chrome's format. No two threads have the same number."""

ENGINE, REQUESTS, GPU = 1, 2, 3  # processes
HOST, DEVICE = 11, 12  # threads of the engine
STREAMS = 200  # the first of the GPU's
FIRST_LANE = 1000  # the first of the requests'
OVERFLOW = 1999  # the track of ends of requests without a lane
