"""A score probe without a model: what it measures are numbers made from positions."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from harness.streams import Memory
from vtoken.signals import Floats, Probe


class FakeProbe:
    """Checks that it is asked about tokens that are there, of requests that it knows.

    Attributes:
        num_measured: requests measured so far.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.known: set[str] = set()
        self.num_measured = 0

    def start(self, request_id: str) -> None:
        self.known.add(request_id)

    def stop(self, request_id: str) -> None:
        self.known.discard(request_id)

    def measure(
        self, targets: Sequence[tuple[Probe, npt.NDArray[np.int64], npt.NDArray[np.int32]]]
    ) -> Callable[[], list[Floats]]:
        answers = []
        for probe, slots, positions in targets:
            assert probe.request_id in self.known
            assert 0 < probe.num_queries <= probe.length
            assert self.memory.positions[slots].tolist() == positions.tolist()
            assert positions.max() == probe.length - 1
            values = np.random.default_rng(probe.length).random((len(probe.measures), probe.length))
            answers.append(values[:, positions].astype(np.float32))
            self.num_measured += 1
        return lambda: answers
