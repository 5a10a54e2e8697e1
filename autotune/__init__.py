"""The tuner: finds launch configurations on a GPU and writes the tables that ``tritonllm.kernels.tuning`` looks up.

``python -m autotune --help`` is the way in. ``ops`` says what is tuned, for which problems, over which space;
``search`` decides, ``worker`` and ``measure`` compile, check and time in processes of their own, ``table`` writes and
checks the tables. ``problem``, ``verify`` and ``timing`` are what the benchmarks in ``bench`` share.
"""
