"""What servers share, whatever answers behind them: limits on heads and bodies, the socket, replies that stream.

Used by :mod:`tritonllm.serve` and :mod:`tritonllm.route`; imports no torch.
"""
