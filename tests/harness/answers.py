"""Answers of an engine in this process."""

from collections.abc import Callable, Sequence
from typing import Any


def finished_outputs(
    llm: Any,
    prompts: Sequence[list[int]],
    sampling: Any,
    after_step: Callable[[], None] = lambda: None,
) -> list[Any]:
    """vLLM's outputs in the order of the prompts, under the ids that the scheduler knows.

    All are queued before the first step.
    """
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    request_ids = llm.enqueue(inputs, sampling, use_tqdm=False)
    engine, finished = llm.llm_engine, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        after_step()
    outputs = []
    for request_id in request_ids:
        output = finished[request_id.rsplit("-", 1)[0]]
        output.request_id = request_id
        outputs.append(output)
    return outputs
