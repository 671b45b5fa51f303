# SPDX-License-Identifier: Apache-2.0
"""Options of a replica and of one request, validated at the edge.

One flat name space: ``additional_config={"vtoken": {"policy": "random", ...}}`` for a replica,
``vllm_xargs={"vtoken.policy": "random", ...}`` for one request. A policy's own knobs are below:
``"policy_knobs": {"recent_share": 0.3}`` there, ``"vtoken.policy_knobs.recent_share": 0.3`` here.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vtoken.errors import OptionError
from vtoken.policy import Policy, make_policy

REQUEST_PREFIX = "vtoken."
KNOBS_PREFIX = "policy_knobs."

ModelT = TypeVar("ModelT", bound=BaseModel)


class EvictionOptions(BaseModel):
    """What one request keeps. All counts are tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str = "keep_all"
    policy_knobs: Mapping[str, int | float] = Field(default_factory=dict)
    seed: int = Field(0, ge=0, lt=2**63)
    budget_tokens: int | None = Field(None, ge=1)
    keep_ratio: float | None = Field(None, gt=0, le=1)
    tick_tokens: int = Field(64, ge=1)
    min_chunk_tokens: int = Field(512, ge=1)
    evict_after_tokens: int = Field(128, ge=0)
    sinks: int = Field(4, ge=0)
    recent: int = Field(32, ge=1)
    protect_prompt: bool = False

    @property
    def evicts(self) -> bool:
        return self.policy != "keep_all"

    def live_target(self, length: int) -> int:
        """Most live tokens wanted of a request of ``length`` tokens (both limits: the smaller)."""
        target = length
        if self.budget_tokens is not None:
            target = min(target, self.budget_tokens)
        if self.keep_ratio is not None:
            # Rounded up: a budget is a promise of what is kept. The subtraction absorbs
            # products such as 0.7 * 10 = 7.000000000000001.
            target = min(target, -int(-(length * self.keep_ratio - 1e-9) // 1))
        return target

    @cached_property
    def scorer(self) -> Policy:
        """The policy itself, made once.

        Raises:
            OptionError: it cannot be made.
        """
        return make_policy(self.policy, self.seed, self.sinks, self.policy_knobs)


class ReplicaOptions(EvictionOptions):
    """Defaults for every request of a replica, how the replica reclaims, and what it measures.

    ``probe`` says whether requests may choose policies that look at attention or keys; by default
    they may if the replica's own policy does. ``probe_layers`` is how many layers are looked at,
    evenly spread, 0 for all; ``probe_queries`` how many of a request's latest queries.
    """

    backend: Literal["lazy_compaction", "hole_filling", "whole_blocks", "none"] = "lazy_compaction"
    reclaim: Literal["pressure", "eager", "adaptive"] = "pressure"
    theta_f: float = Field(0.25, ge=0, lt=1)
    headroom: float = Field(0.02, ge=0, lt=0.5)
    low_water: float = Field(0.05, ge=0, lt=1)
    batch_blocks: int = Field(64, ge=2)
    check: bool = False
    audit_dir: str | None = None
    probe: bool | None = None
    probe_layers: int = Field(4, ge=0)
    probe_queries: int = Field(32, ge=1)
    head_reduction: Literal["mean", "max"] = "mean"

    @property
    def probes(self) -> bool:
        return bool(self.scorer.signals) if self.probe is None else self.probe


def parse_replica_options(raw: Mapping[str, Any] | None) -> ReplicaOptions:
    """Options of a replica from ``additional_config["vtoken"]``.

    Raises:
        OptionError: unknown name, value out of range, or a combination that cannot work.
    """
    options = _validate(ReplicaOptions, dict(raw or {}), prefix="")
    _check_combination(options, options, prefix="")
    return options


def parse_request_options(
    extra_args: Mapping[str, Any] | None, replica: ReplicaOptions
) -> EvictionOptions:
    """The replica's defaults with one request's ``vtoken.*`` keys on top.

    A request that names a budget or a ratio replaces both; one that asks for ``keep_all``
    and names neither drops both. One that names another policy drops the knobs.

    Raises:
        OptionError: unknown name, value out of range, or a combination that cannot work.
    """
    own = {
        key.removeprefix(REQUEST_PREFIX): value
        for key, value in (extra_args or {}).items()
        if key.startswith(REQUEST_PREFIX)
    }
    if extra_args and "vtoken" in extra_args:
        raise OptionError("`vtoken`: use flat keys such as `vtoken.policy` in vllm_xargs")
    base = {name: getattr(replica, name) for name in EvictionOptions.model_fields}
    if own.get("policy") == "keep_all" or "budget_tokens" in own or "keep_ratio" in own:
        base["budget_tokens"] = base["keep_ratio"] = None
    if own.get("policy", replica.policy) != replica.policy:
        base["policy_knobs"] = {}
    knobs = [key for key in own if key.startswith(KNOBS_PREFIX)]
    ours = {key.removeprefix(KNOBS_PREFIX): own.pop(key) for key in knobs}
    base["policy_knobs"] = {**base["policy_knobs"], **ours}
    options = _validate(EvictionOptions, base | own, prefix=REQUEST_PREFIX)
    _check_combination(options, replica, prefix=REQUEST_PREFIX)
    return options


def _validate(model: type[ModelT], raw: dict[str, Any], prefix: str) -> ModelT:
    try:
        return model(**raw)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                known = ", ".join(sorted(model.model_fields))
                lines.append(f"`{prefix}{name}` is not an option; known: {known}")
            else:
                lines.append(f"`{prefix}{name}`={item['input']!r}: {item['msg']}")
        raise OptionError("; ".join(lines)) from None


def _check_combination(options: EvictionOptions, replica: ReplicaOptions, prefix: str) -> None:
    policy = options.scorer  # refuses an unknown name
    if policy.signals and not replica.probes:
        raise OptionError(
            f"`{prefix}policy`={options.policy!r} looks at {', '.join(sorted(policy.signals))}, "
            f"which this replica does not measure: start it with `probe`=true"
        )
    limited = options.budget_tokens is not None or options.keep_ratio is not None
    if options.evicts and not limited:
        raise OptionError(
            f"`{prefix}policy`={options.policy!r} evicts nothing without a limit: "
            f"set `{prefix}budget_tokens` or `{prefix}keep_ratio`"
        )
    if not options.evicts and limited:
        raise OptionError(
            f"`{prefix}budget_tokens` and `{prefix}keep_ratio` have no effect with policy "
            f"keep_all: name a policy that evicts with `{prefix}policy`"
        )
    protected = max(options.sinks, policy.num_protected) + options.recent
    if options.budget_tokens is not None and options.budget_tokens < protected:
        raise OptionError(
            f"`{prefix}budget_tokens`={options.budget_tokens} is smaller than the {protected} "
            f"tokens that are protected (sinks + recent): raise it to at least {protected}, or "
            f"lower `{prefix}sinks` or `{prefix}recent`"
        )
