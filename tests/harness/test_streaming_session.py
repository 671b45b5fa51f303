"""A streaming session holds its row between turns; its next turn is admitted like anybody."""

from collections.abc import Callable

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from harness.fake_worker import FakeWorker
from harness.replica import Replica, prompt
from harness.scenes import KEEP_HALF, step_until
from vtoken.plan import StepOrders

Make = Callable[..., Replica]
CAPPED = KEEP_HALF | {"policy": "streaming_llm", "budget_tokens": 110}


class SessionWorker(FakeWorker):
    """vLLM's worker gets a session's next turn as a new request under an id that it knows."""

    def _update(self, output: SchedulerOutput, orders: StepOrders) -> None:
        everybody = output.scheduled_new_reqs
        output.scheduled_new_reqs = [new for new in everybody if new.req_id not in self.rows]
        super()._update(output, orders)
        for new in everybody:
            if new not in output.scheduled_new_reqs:
                self.rows[new.req_id] = list(new.block_ids[0])
                self.tokens[new.req_id] = list(new.prompt_token_ids)
                text = self.oracle.texts[new.req_id]
                del text.payloads[new.num_computed_tokens :]
                text.visible = set(range(new.num_computed_tokens))
        output.scheduled_new_reqs = everybody


def turn(replica: Replica, tokens: list[int], max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, extra_args={})
    params.update_from_generation_config({}, eos_token_id=None)
    request = Request(
        request_id="s",
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=None,
        block_hasher=replica.hasher,
        arrival_time=0,
        resumable=True,
    )
    replica.scheduler.add_request(request)
    replica.worker.oracle.options["s"] = replica.scheduler.eviction["s"]


def test_a_next_turn_takes_nothing_that_others_were_promised(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.replica.FakeWorker", SessionWorker)
    settings = {"reclaim": "pressure", "low_water": 0, "headroom": 0}
    replica = make(num_blocks=36, max_batched=512, vtoken=settings)
    turn(replica, prompt(5, 60), 5)
    waiting = RequestStatus.WAITING_FOR_STREAMING_REQ
    step_until(replica, lambda: replica.scheduler.requests["s"].status == waiting)
    for i in range(6):
        replica.arrive(prompt(i, 60), 400, **CAPPED)
    step_until(replica, lambda: replica.counts["steps"] == 12)
    turn(replica, prompt(6, 430), 20)
    replica.schedule()
    session = replica.scheduler.requests["s"]
    assert session.status == RequestStatus.WAITING
    for _ in range(800):
        replica.schedule()
    assert session.status == waiting and session.num_computed_tokens >= 60 + 430
    replica.scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    replica.run_to_the_end()
    assert replica.scheduler.num_preemptions == 0
