"""The offline interface: ``LLM(model).generate(prompts, SamplingParams(...))``, as in vLLM."""

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from tritonllm.config import EngineConfig
from tritonllm.engine.engine import LLMEngine
from tritonllm.engine.input_processor import Prompt
from tritonllm.engine.outputs import RequestOutput
from tritonllm.sampling_params import RequestOutputKind, SamplingParams

Message = Mapping[str, Any]


class LLM:
    """A model ready to generate, in this process.

    Args:
        model: a folder in Hugging Face format, or a hub id.
        kwargs: the fields of :class:`ModelConfig`, :class:`CacheConfig`, :class:`SchedulerConfig` and
            :class:`EngineConfig`, by name. ``num_gpu_blocks_override`` is vLLM's name for ``num_blocks``.

    Raises:
        ValueError: an unknown argument, a bad value, or a model that cannot be loaded; says which and what to do.
    """

    def __init__(self, model: str, *, tensor_parallel_size: int = 1, **kwargs: Any) -> None:
        if tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size={tensor_parallel_size}: only one GPU so far, leave it at 1")
        if "num_gpu_blocks_override" in kwargs:
            if "num_blocks" in kwargs:
                raise ValueError("num_gpu_blocks_override and num_blocks are the same: give one")
            kwargs["num_blocks"] = kwargs.pop("num_gpu_blocks_override")
        self.engine = LLMEngine.from_config(EngineConfig.from_kwargs(model=model, **kwargs))
        self._ids = itertools.count()

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer; ``None`` with ``skip_tokenizer_init``."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt.

        Args:
            prompts: one or several of: text, a list of token ids, ``{"prompt": ...}``, ``{"prompt_token_ids": [...]}``.
            sampling_params: one for all, or one for each prompt.
            use_tqdm: show a progress bar with throughput.
            priority: one for each prompt (lower is earlier); needs ``policy="priority"``.

        Returns:
            One output per prompt, in their order.

        Raises:
            ValueError: bad input, naming the prompt by its index; nothing was generated.
        """
        batch = _as_list(prompts)
        params = _one_each("sampling_params", sampling_params or SamplingParams(), len(batch))
        priorities = [0] * len(batch) if priority is None else _one_each("priority", list(priority), len(batch))
        ids = [str(next(self._ids)) for _ in batch]
        try:
            for index, request in enumerate(zip(ids, batch, params, priorities, strict=True)):
                self._add(f"prompts[{index}]: " if len(batch) > 1 else "", *request)
            outputs = self._run(len(ids), use_tqdm)
        except BaseException:  # Ctrl-C too: leave no request behind for the next call
            self.engine.abort_request(ids)
            raise
        return [outputs[request_id] for request_id in ids]

    def _add(self, where: str, request_id: str, prompt: Prompt, params: SamplingParams, priority: int) -> None:
        try:
            if not isinstance(params, SamplingParams):
                raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
            final = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
            self.engine.add_request(request_id, prompt, final, priority=priority)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error

    def _run(self, total: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        start, read, written = time.monotonic(), 0, 0
        with tqdm(total=total, desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    outputs[output.request_id] = output
                    read += len(output.prompt_token_ids)
                    written += sum(len(completion.token_ids) for completion in output.outputs)
                    seconds = max(time.monotonic() - start, 1e-9)
                    rates = f"in {read / seconds:.0f} tok/s, out {written / seconds:.0f} tok/s"
                    bar.set_postfix_str(rates, refresh=False)
                    bar.update()
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of ``{"role": ..., "content": ...}``.

        Args:
            chat_template: a Jinja template to use instead of the tokenizer's.
            add_generation_prompt: end the prompt where the assistant's turn begins.

        Raises:
            ValueError: no tokenizer, no chat template, or a malformed conversation.
        """
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        options: dict[str, Any] = {"chat_template": chat_template, "add_generation_prompt": add_generation_prompt}
        prompts = [self.render_chat(conversation, **options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def render_chat(
        self,
        conversation: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """The prompt that :meth:`chat` makes of one conversation; arguments and errors are the same."""
        tokenizer = self.get_tokenizer()
        if tokenizer is None:
            raise ValueError("chat needs a tokenizer: leave out skip_tokenizer_init, or pass token ids to generate")
        if not conversation or not all(isinstance(m, Mapping) and "role" in m for m in conversation):
            raise ValueError("messages must be dicts with 'role' and 'content', at least one in a conversation")
        if chat_template is None and not getattr(tokenizer, "chat_template", None):
            raise ValueError("the model's tokenizer has no chat template: pass chat_template, or use generate")
        text = tokenizer.apply_chat_template(
            conversation, chat_template=chat_template, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        # the template writes the special tokens itself
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several? A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts: give one, or one for each")
    return list(values)
