"""Handlers for the tuner's worker processes that need neither a GPU nor a compiler."""

import os
import time

from autotune.worker import Failed


class FakeGpu:
    """Time follows from the configuration; some configurations do what broken kernels do."""

    def measure(self, op, problem, key, config, careful):
        match config["BLOCK"]:
            case 1:
                os.abort()
            case 2:
                time.sleep(3600)
            case 3:
                raise Failed("output 0: error 0.5 > 0.01")
            case 4:
                raise KeyError("a defect of the worker itself")
        os.write(1, b"noise on standard output")
        return 1000.0 / config["BLOCK"]

    def process(self):
        return os.getpid()
