"""Hypothesis state machines, run the same way every time."""

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_machine(
    machine: type[RuleBasedStateMachine], number: int, max_examples: int, num_steps: int
) -> None:
    """Run it with seed ``number``, without a database of examples and without shrinking."""
    run_state_machine_as_test(
        seed(number)(machine),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_steps,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
