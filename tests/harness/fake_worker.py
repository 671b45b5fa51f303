"""A worker without a device: vLLM's V1 bookkeeping, the real shard, fake queues and memory.

Its order of work is that of worker/cpu_runner.py. Each fault is one wrong order that it can be told
to make, so that tests can show that the harness sees it.
"""

import pickle
from enum import Enum, auto

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from harness.fake_probe import FakeProbe
from harness.oracle import Oracle, chain
from harness.streams import FakeCopyEngine, Memory, OrderViolation, Streams
from vtoken.plan import NO_ORDERS, StepOrders, StepReport
from vtoken.shard import Shard, Splice

NUM_TOKEN_IDS = 97


class Fault(Enum):
    """A planted wrong order."""

    COMMIT_WITHOUT_WAIT = auto()
    ABORT_WITHOUT_WAIT = auto()
    COPY_BEFORE_FORWARD = auto()
    SPLICE_AFTER_APPENDS = auto()
    SPLICE_AFTER_FORWARD = auto()
    FILL_AFTER_FORWARD = auto()


class FakeWorker:
    """Executes each output when it is issued; the copies end when ``engine.lag`` says so."""

    def __init__(self, num_blocks: int, block_size: int, fault: Fault | None = None) -> None:
        self.fault = fault
        self.memory = Memory(num_blocks, block_size)
        self.streams = Streams(num_blocks)
        self.engine = FakeCopyEngine(self.memory, self.streams)
        self.oracle = Oracle(block_size)
        self.shard = Shard(0, block_size, self.engine, self._row_of, check=True)
        self.shard.probe = self.probe = FakeProbe(self.memory)
        self.rows: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        # Another process would get its own copy of the orders.
        orders: StepOrders = pickle.loads(pickle.dumps(getattr(output, "vtoken", NO_ORDERS)))
        before = self.streams.main
        self._forget_waits(orders)
        old_rows = {request_id: list(row) for request_id, row in self.rows.items()}
        splices = self.shard.settle(orders)
        if self.fault not in (Fault.SPLICE_AFTER_APPENDS, Fault.SPLICE_AFTER_FORWARD):
            self._apply(splices, self.rows)
            if self.fault is not Fault.FILL_AFTER_FORWARD:
                self._apply(self.shard.fill(orders.fillings), self.rows)
        else:
            splices += self.shard.fill(orders.fillings)
        self._update(output, orders)
        if self.fault is Fault.SPLICE_AFTER_APPENDS:
            self._apply(splices, old_rows)
        self.oracle.hear()
        sampled = [self._forward(output, r) for r in output.num_scheduled_tokens]
        if self.fault is Fault.SPLICE_AFTER_FORWARD:
            self._apply(splices, self.rows)
        if self.fault is Fault.FILL_AFTER_FORWARD:
            self._apply(self.shard.fill(orders.fillings), self.rows)
        early = self.fault is Fault.COPY_BEFORE_FORWARD
        self.engine.after_main = before if early else self.streams.main
        observations = self.shard.observe(orders.probes)()
        votes = self.shard.prepare(orders.prepares) + self.shard.copied()
        last = {vote.plan_id: vote for vote in votes}
        return self._answer(output, sampled, StepReport(tuple(last.values()), tuple(observations)))

    def _forget_waits(self, orders: StepOrders) -> None:
        if self.fault is Fault.COMMIT_WITHOUT_WAIT:
            self.engine.deaf_to.update(orders.commits)
        if self.fault is Fault.ABORT_WITHOUT_WAIT:
            self.engine.deaf_to.update(orders.aborts)

    def _apply(self, splices: list[Splice], rows: dict[str, list[int]]) -> None:
        for splice in splices:
            row = splice.apply(rows[splice.request_id])
            if splice.request_id in self.rows:
                self.rows[splice.request_id] = row

    def _update(self, output: SchedulerOutput, orders: StepOrders) -> None:
        """vLLM's ``_update_states``, between ours: finished, started, new, running, resumed."""
        for request_id in output.finished_req_ids:
            self.shard.stop(request_id)
            self.oracle.end(request_id)
            self.rows.pop(request_id, None)
            self.tokens.pop(request_id, None)
        for request_id in output.preempted_req_ids or ():
            self.shard.stop(request_id)
        for request_id, incarnation in orders.started.items():
            self.shard.start(request_id, incarnation)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.rows
            self._begin(new.req_id, new.block_ids[0], new.prompt_token_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            blocks, computed = cached.new_block_ids[i], cached.num_computed_tokens[i]
            if request_id in cached.resumed_req_ids:
                tokens = cached.all_token_ids[request_id]
                self._begin(request_id, blocks[0], tokens, computed)
            elif blocks is not None:
                self.rows[request_id].extend(blocks[0])
            assert computed == len(self.oracle.texts[request_id].payloads)

    def _begin(self, request_id: str, row: list[int], tokens: list[int], num_hits: int) -> None:
        self.rows[request_id] = list(row)
        self.tokens[request_id] = list(tokens)
        self.oracle.begin(request_id, tokens[:num_hits])

    def _forward(self, output: SchedulerOutput, request_id: str) -> list[int]:
        """Read every resident slot, write the new ones, sample if no known token is left."""
        memory, row, tokens = self.memory, self.rows[request_id], self.tokens[request_id]
        start = len(self.oracle.texts[request_id].payloads)
        stop = start + output.num_scheduled_tokens[request_id]
        shift = self.shard.shift(request_id)
        try:
            slots = memory.slots(row, 0, stop - shift)
        except IndexError:
            raise OrderViolation(f"{request_id}: the row ends before its tokens") from None
        old, new = slots[: start - shift], slots[start - shift :]
        blocks = np.unique(old // memory.block_size), np.unique(new // memory.block_size)
        self.streams.on_main(*blocks)
        self.oracle.check(request_id, memory.positions[old], memory.payloads[old])
        seen = int(memory.payloads[old].sum())
        payloads = chain(tokens[start:stop], start, seen)
        memory.positions[new] = np.arange(start, stop)
        memory.payloads[new] = payloads
        self.oracle.append(request_id, payloads)
        if stop < len(tokens):
            return []
        tokens.append(payloads[-1] % NUM_TOKEN_IDS)
        return tokens[-1:]

    def _answer(
        self, output: SchedulerOutput, sampled: list[list[int]], report: StepReport
    ) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        if not ids and report == StepReport():
            return EMPTY_MODEL_RUNNER_OUTPUT
        index = {request_id: i for i, request_id in enumerate(ids)}
        answer = ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=sampled)
        if report != StepReport():
            answer.vtoken = report
        return answer

    def _row_of(self, request_id: str) -> list[int] | None:
        row = self.rows.get(request_id)
        return list(row) if row is not None else None
