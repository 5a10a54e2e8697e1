"""A router in front of servers that speak OpenAI's API: ``tritonllm route`` (docs/routing.md).

It imports no engine and no torch, so that it starts at once on a machine without a GPU.
"""
