"""``AsyncLLM`` and what stands between it and an engine: processes, messages, replicas, restarts."""
