"""Policies run when they are due, but not all in one step."""

from collections import Counter

from harness.tables import make_request
from vtoken.request import EvictingRequest
from vtoken.ticks import MAX_TICKS, TickQueue

TICK = 64


def make(number: int, prefill_end: int = 0) -> EvictingRequest:
    request = make_request(8, [], [1, 2])
    request.request_id, request.prefill_end = f"r{number}", prefill_end
    return request


def test_requests_that_were_admitted_together_spread_out() -> None:
    queue, runs, gaps = TickQueue(), Counter[int](), set()
    last: dict[str, int] = {}
    for number in range(100):
        queue.add(make(number), 0)
    for step in range(10 * TICK):
        for request, length in queue.take(step, lambda _: 1000):
            assert length == 1000
            runs[step] += 1
            if step > 2 * TICK:
                gaps.add(step - last[request.request_id])
            last[request.request_id] = step
            queue.add(request, step + TICK)
    assert max(runs.values()) == MAX_TICKS
    assert sum(runs.values()) == 10 * 100, "nobody is forgotten"
    assert gaps == {TICK}, "late once, then on time"


def test_a_prefill_is_never_late() -> None:
    queue = TickQueue()
    for number in range(40):
        queue.add(make(number), 3)
    for number in range(40, 80):
        queue.add(make(number, prefill_end=1000), 3)
    taken = [request.request_id for request, _ in queue.take(3, lambda _: 1000)]
    assert taken == [f"r{number}" for number in (*range(MAX_TICKS), *range(40, 80))]
    # What is late goes before what is due.
    queue.add(make(99), 4)
    taken = [request.request_id for request, _ in queue.take(4, lambda _: 1000)]
    assert taken == [f"r{number}" for number in range(MAX_TICKS, 2 * MAX_TICKS)]


def test_a_request_that_has_ended_leaves_the_queue() -> None:
    queue = TickQueue()
    queue.add(make(1), 0)
    assert list(queue.take(0, lambda _: None)) == []
    assert list(queue.take(1, lambda _: 9)) == []
