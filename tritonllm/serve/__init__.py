"""The HTTP server and what stands between it and the engine: ``AsyncLLM``, its engine process, and the OpenAI API.

The API process tokenizes, renders chat templates and speaks HTTP; the engine process runs steps. Needs the extra
``serve``.
"""
