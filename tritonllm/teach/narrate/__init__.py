"""``tritonllm generate --narrate``: what the engine does, told in plain sentences with its own numbers (docs/teach.md).

Events become acts, which are data (:mod:`~tritonllm.teach.narrate.story`); a language has sentences for them
(``words_en``, ``words_zh``); a terminal gets both (``show``). A recorder beside the sampler keeps the logits that a
token was drawn from (``recorder``), and ``filters`` repeats what the sampler does to them.
"""
