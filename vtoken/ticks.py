# SPDX-License-Identifier: Apache-2.0
"""When each request's policy runs: the checks of stage 1, spread over steps (paper section 3.3)."""

from collections.abc import Callable, Iterator

from vtoken.request import EvictingRequest

# Policy runs of decoding requests per step. Of many that were admitted together all are due in one
# step; the rest waits for the next one, and from then on they are spread.
MAX_TICKS = 16


class TickQueue:
    """Requests by the step in which their policy should run."""

    def __init__(self) -> None:
        self._due: dict[int, list[EvictingRequest]] = {}

    def add(self, request: EvictingRequest, step: int) -> None:
        self._due.setdefault(step, []).append(request)

    def take(
        self, step: int, length_of: Callable[[EvictingRequest], int | None]
    ) -> Iterator[tuple[EvictingRequest, int]]:
        """The requests of this step with their lengths, prefills all, others up to MAX_TICKS.

        Args:
            length_of: a request's length, or None if it has ended.
        """
        ticks, late = 0, []
        for request in self._due.pop(step, ()):
            length = length_of(request)
            if length is None:
                continue
            if length > request.prefill_end:
                if ticks == MAX_TICKS:
                    late.append(request)
                    continue
                ticks += 1
            yield request, length  # a prefill is never late: its next chunk relies on the room
        if late:
            self._due[step + 1] = late + self._due.get(step + 1, [])
