"""The engine: requests become plans of steps, and steps become tokens.

Each folder is a room, and imports go down this list only: loop, ranks, start, step, cache, drafts, text, grammar,
transfer, schedule, data.
"""
