"""What has arrived for one request and was not read yet: one output at most, however slow its reader is."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from tritonllm.config.sampling_params import RequestOutputKind
from tritonllm.engine.data.outputs import CompletionOutput, RequestOutput
from tritonllm.engine.text.detokenizer import IncrementalDetokenizer


def _join(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    """Two deltas of a continuation as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    token_ids = [*first.token_ids, *second.token_ids]
    return replace(second, text=first.text + second.text, token_ids=token_ids, logprobs=logprobs)


def join(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs that follow each other, of deltas, as one; the result may share parts with both."""
    outputs = {completion.index: completion for completion in first.outputs}
    for completion in second.outputs:
        before = outputs.get(completion.index)
        outputs[completion.index] = completion if before is None else _join(before, completion)
    second.outputs = [outputs[index] for index in sorted(outputs)]
    return second


class Texts:
    """Makes the text of a request's outputs here, so that the engine's steps need not.

    Only for requests without stop strings: those the engine has to find.

    Args:
        new: makes a detokenizer for one continuation.
        keep_end: a token that ends the output is a part of its text.
    """

    def __init__(self, new: Callable[[], IncrementalDetokenizer], *, keep_end: bool = False) -> None:
        self._new, self._keep_end = new, keep_end
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}

    def add(self, output: RequestOutput) -> None:
        """Fill in what the new tokens say."""
        for completion in output.outputs:
            detokenizer = self._detokenizers.get(completion.index)
            if detokenizer is None:
                detokenizer = self._detokenizers[completion.index] = self._new()
            drop_end = completion.finish_reason == "stop" and not self._keep_end
            tokens = completion.token_ids[:-1] if drop_end else completion.token_ids
            completion.text = "".join([detokenizer.append(token) for token in tokens])
            if completion.finish_reason not in (None, "error"):
                completion.text += detokenizer.finish()


class Collector:
    """Between the task that receives from the engine and the one that serves a request.

    Args:
        prompt, prompt_token_ids: the text and the token ids of the request's prompt.
        kind: what :meth:`get` returns; the engine sends deltas, or only the end.
        texts: makes the text; ``None`` if it comes with the outputs, or there is none.
    """

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        kind: RequestOutputKind,
        texts: Texts | None = None,
    ) -> None:
        self._texts = texts
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._kind = kind
        self._so_far: RequestOutput | None = None
        self._unread: RequestOutput | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, new: RequestOutput) -> None:
        """Take in an output, which from now on is this object's; it came without its prompt."""
        if self._texts is not None:
            self._texts.add(new)
        new.prompt, new.prompt_token_ids = self._prompt, self._prompt_token_ids
        self._unread = new if self._unread is None else join(self._unread, new)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Let :meth:`get` raise the error, after what has arrived before."""
        self._error = error
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """What has come since the last call; waits for it.

        Raises:
            Exception: what :meth:`fail` was given.
        """
        await self._arrived.wait()
        output, self._unread = self._unread, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._arrived.clear()
        if self._kind is RequestOutputKind.CUMULATIVE:
            output = output if self._so_far is None else join(self._so_far, output)
            self._so_far = output
            return replace(output, outputs=list(output.outputs))  # later ones are put in place of those in ours
        return output
