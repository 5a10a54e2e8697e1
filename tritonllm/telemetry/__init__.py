"""Consumers of the engine's events (:mod:`tritonllm.events`): what runs now, traces, and records of kernels.

Used by servers, by ``LLM`` and by :mod:`tritonllm.teach`.
"""
