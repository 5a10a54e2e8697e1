"""Which token ends an output, as far as tokens and lengths decide it. No torch."""

from tritonllm.engine.data.request import Request, RequestStatus

Ending = tuple[RequestStatus, int | str | None]  # the status and the stop reason


def cut(request: Request, new: int) -> Ending | None:
    """Find the first of the ``new`` last tokens of an output that ends it, and drop those behind it; ``None`` if there
    is none."""
    output = request.output_token_ids
    for length in range(len(output) - new + 1, len(output) + 1):
        found = ending(request, length)
        if found is not None:
            del output[length:]
            return found
    return None


def ending(request: Request, length: int) -> Ending | None:
    """How an output that is ``length`` tokens long ends, if it does. An end-of-sequence or stop token, or a repetition,
    counts from ``min_tokens`` on; where it meets the length limit, it is the reason. A structured output ends with its
    form, however short that is."""
    params, token = request.params, request.output_token_ids[length - 1]
    long_enough = length >= params.min_tokens
    if (
        (long_enough or params.structured_outputs is not None)
        and token in request.eos_token_ids
        and not params.ignore_eos
    ):
        return RequestStatus.FINISHED_STOPPED, None
    if long_enough:
        if params.stop_token_ids and token in params.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED, token
        repeats = params.repetition_detection
        if repeats is not None and repeats.found(request.output_token_ids, length):
            return RequestStatus.FINISHED_REPETITION, "repetition_detected"
    if len(request.prompt_token_ids) + length >= request.length_limit:
        return RequestStatus.FINISHED_LENGTH, None
    return None
