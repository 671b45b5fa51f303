# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of stock vLLM, from a process that loads nothing of this project.

A script: reads a job (JSON) from the first file it is given and writes the answers to the second.
"""

import json
import sys
from pathlib import Path


def main(job_path: str, result_path: str) -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_path).read_text())
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, logprobs=1
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = LLM(**job["engine"]).generate(prompts, sampling, use_tqdm=False)
    ours = sorted(sys.modules.keys() & {"vtoken", "worker", "scheduler"})
    if ours:
        raise SystemExit(f"not a stock engine: {ours} are loaded")
    answers = [output.outputs[0] for output in outputs]
    result = [
        {
            "text": answer.text,
            "token_ids": list(answer.token_ids),
            "logprobs": [
                entry[token].logprob
                for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)
            ],
        }
        for answer in answers
    ]
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
