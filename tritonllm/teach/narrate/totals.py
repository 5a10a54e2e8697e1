"""Sums over a narration, which are the engine's own counters (tests compare them)."""

from dataclasses import dataclass

from tritonllm.events import Event, RequestAdded, RequestFinished, StepFinished, StepPlanned, TokensForced


@dataclass
class Totals:
    """Sums of what was told so far.

    Attributes:
        requests: how many requests came in.
        prompt_tokens: how many tokens their prompts have.
        generated_tokens: how many tokens the requests that have ended generated.
        cached_tokens: how many prompt tokens the prefix cache gave.
        steps, computed_tokens: steps, and the tokens that went through the model in them, guesses among them.
        preemptions: how many sequences lost their blocks.
        copied_blocks, stored_blocks, loaded_blocks, evicted_blocks: copy-on-write, and the host's memory.
        draft_tokens, accepted_tokens: guesses that were verified, and those of them that were right.
        forced_tokens: how many tokens a grammar left no choice about, so that nobody drew them.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    copied_blocks: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    evicted_blocks: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0

    def add(self, event: Event, evicted_before: int) -> None:
        """Count an event.

        Args:
            evicted_before: how many blocks had been evicted when the narration began.
        """
        match event:
            case RequestAdded():
                self.requests += 1
                self.prompt_tokens += len(event.prompt_token_ids)
            case StepPlanned():
                self.steps += 1
                self.computed_tokens += event.num_tokens
                self.preemptions += len(event.preempted)
                self.copied_blocks += len(event.copies)
                self.stored_blocks += len(event.stores)
                self.loaded_blocks += len(event.loads)
                self.evicted_blocks = event.evicted_blocks - evicted_before
            case StepFinished():
                self.draft_tokens += sum(new.drafts for new in event.tokens)
                self.accepted_tokens += sum(new.accepted for new in event.tokens)
            case TokensForced():
                self.forced_tokens += sum(len(new.token_ids) for new in event.tokens)
            case RequestFinished():
                self.generated_tokens += sum(event.num_output_tokens)
                self.cached_tokens += event.num_cached_tokens
