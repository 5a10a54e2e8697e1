"""``LLM``: batches of prompts, with the engine in this process, or with several engines in processes of their own."""
