"""What an engine does, on one screen: requests, tokens, blocks, steps. ``tritonllm generate --dashboard`` shows an
engine of this process, ``tritonllm dashboard --url`` that of a server (docs/teach.md).

:mod:`~tritonllm.telemetry.activity_state` follows an engine's events, and knows nothing of screens; a server does the
same for who asks it. :mod:`~tritonllm.teach.dashboard.app` shows what a source gives, and knows nothing of engines.
"""
