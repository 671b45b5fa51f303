# SPDX-License-Identifier: Apache-2.0
"""The contract between an eviction policy and the substrate.

A policy scores the live tokens of ONE request; budget, protection and top-k live here, once.
It never sees slots, blocks or the engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from inspect import signature
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vtoken.errors import OptionError, PolicyError
from vtoken.signals import Scores, Signal

Positions = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

POLICY_GROUP = "vtoken.policies"

__all__ = [  # Scores and Signal too: a policy finds what it needs in one place
    "Policy",
    "Scores",
    "Signal",
    "TokenView",
    "checked_scores",
    "choose_victims",
    "make_policy",
    "policy_names",
    "protected_mask",
]


@dataclass(frozen=True)
class TokenView:
    """What a policy sees of one request.

    Attributes:
        positions: int32 ``[num_tokens]``, place of each token in the text, in no promised order.
        length: tokens of the request so far, evicted ones included.
        num_prompt_tokens: how many of them the prompt has.
        budget: most tokens that may be live after the policy has run.
        signals: those that the policy has declared, float64 ``[num_tokens]`` each.
    """

    positions: Positions
    length: int
    num_prompt_tokens: int
    budget: int = 0
    signals: Mapping[Signal, Scores] = field(default_factory=dict)


class Policy(Protocol):
    """Scores tokens. A frozen dataclass whose fields are its knobs, which are numbers (requests set
    them as ``policy_knobs``); holds no state."""

    @property
    def signals(self) -> frozenset[Signal]:
        """What it needs to know about tokens; only that is measured."""
        ...

    @property
    def num_protected(self) -> int:
        """Tokens that this policy itself never evicts, whatever the budget."""
        ...

    def score(self, view: TokenView) -> Scores:
        """float64 ``[num_tokens]``, higher means keep. Must not depend on the view's order."""
        ...


def policy_names() -> list[str]:
    """Every policy that can be asked for: ours and those of entry points."""
    from vtoken.policies import POLICIES

    return sorted({*POLICIES, *(point.name for point in entry_points(group=POLICY_GROUP))})


def make_policy(
    name: str, seed: int, sinks: int, knobs: Mapping[str, int | float] = MappingProxyType({})
) -> Policy:
    """The policy called ``name``: one of ours, or an entry point of group ``vtoken.policies``.

    Args:
        knobs: the policy's own, by name; those not given keep their defaults.

    Raises:
        OptionError: no policy has this name, it has no such knob, or it cannot be made.
    """
    from vtoken.policies import POLICIES

    factory: Callable[..., Policy] | None = POLICIES.get(name)
    points = [] if factory else entry_points(group=POLICY_GROUP, name=name)
    if not factory and not points:
        known = ", ".join(policy_names())
        raise OptionError(f"`policy`={name!r} is unknown; choose one of: {known}")
    try:
        for point in points:
            factory = point.load()
        assert factory is not None
        if knobs:  # most have none, and looking takes longer than making the policy
            _check_knobs(name, factory, knobs)
        policy = factory(seed=seed, sinks=sinks, **knobs)
        unknown = frozenset(policy.signals) - frozenset(Signal)
        _ = int(policy.num_protected)
    except OptionError:
        raise
    except Exception as error:  # of somebody else's code anything may come
        raise OptionError(f"`policy`={name!r} cannot be made: {error!r}") from error
    if unknown:
        known = ", ".join(Signal)
        raise OptionError(f"`policy`={name!r} needs signals {sorted(unknown)}; there are {known}")
    return policy


def _check_knobs(name: str, factory: Callable[..., Policy], knobs: Mapping[str, Any]) -> None:
    has = set(signature(factory).parameters) - {"seed", "sinks"}
    if unknown := ", ".join(sorted(set(knobs) - has)):
        known = ", ".join(sorted(has)) or "none"
        raise OptionError(f"`policy`={name!r} has no knob {unknown}; known: {known}")


def checked_scores(policy: Policy, view: TokenView) -> tuple[Scores, Mask]:
    """The policy's scores of ``view``, and which were not a number: those tokens must stay.

    Raises:
        PolicyError: they are not one number per token, or the policy raised.
    """
    try:
        scores = np.asarray(policy.score(view), np.float64)
    except Exception as error:  # of somebody else's code anything may come
        raise PolicyError(f"{policy} raised {error!r}") from error
    if scores.shape != view.positions.shape:
        raise PolicyError(f"{policy} scored {scores.shape}, not {view.positions.shape} tokens")
    unknown = np.isnan(scores)
    return np.where(unknown, np.inf, scores), unknown


def protected_mask(view: TokenView, sinks: int, recent: int, prompt: bool) -> Mask:
    """bool ``[num_tokens]``: tokens that no policy may evict."""
    first_free = max(sinks, view.num_prompt_tokens if prompt else 0)
    return (view.positions < first_free) | (view.positions >= view.length - recent)


def choose_victims(
    view: TokenView, scores: Scores, protected: Mask, num_victims: int
) -> npt.NDArray[np.int64]:
    """Rows of ``view`` to evict: exactly the ``num_victims`` lowest scores that are not
    protected, or all of those if there are fewer. Ties fall to the lower position first, so
    the outcome does not depend on the order of the rows.
    """
    if num_victims <= 0:
        return np.empty(0, np.int64)
    ranked = np.where(protected, np.inf, scores)
    if num_victims >= ranked.size:
        return np.flatnonzero(~protected)
    threshold = np.partition(ranked, num_victims - 1)[num_victims - 1]
    rows = np.flatnonzero(ranked <= threshold)
    if rows.size == num_victims and threshold < np.inf:
        return rows
    # Ties at the threshold, or fewer candidates than victims: the slow, exact way.
    order: npt.NDArray[np.int64] = np.lexsort((view.positions, ranked, protected))[:num_victims]
    chosen: npt.NDArray[np.int64] = order[~protected[order]]
    return chosen
