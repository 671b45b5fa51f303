"""Options of a replica and of a request: every refusal names the option and the way out."""

from typing import Any

import pytest

from vtoken.errors import OptionError
from vtoken.options import (
    EvictionOptions,
    ReplicaOptions,
    parse_replica_options,
    parse_request_options,
)
from vtoken.policies.h2o import H2O
from vtoken.policies.snapkv import SnapKV

RANDOM = {"policy": "random", "budget_tokens": 64}

REFUSED = [
    ({"polcy": "random"}, "`polcy` is not an option; known: .*policy"),
    ({"policy": "h3o"}, "`policy`='h3o' is unknown; choose one of: h2o, keep_all"),
    ({"policy": 3}, "`policy`=3: .*string"),
    ({**RANDOM, "seed": -1}, "`seed`=-1: .*greater than or equal to 0"),
    ({**RANDOM, "seed": 2**63}, "`seed`=.*: .*less than"),
    ({"policy": "random", "budget_tokens": 0}, "`budget_tokens`=0: .*greater than or equal to 1"),
    ({"policy": "random", "budget_tokens": "few"}, "`budget_tokens`='few': .*integer"),
    ({"policy": "random", "keep_ratio": 0}, "`keep_ratio`=0: .*greater than 0"),
    ({"policy": "random", "keep_ratio": 1.5}, "`keep_ratio`=1.5: .*less than or equal to 1"),
    ({**RANDOM, "tick_tokens": 0}, "`tick_tokens`=0: .*greater than or equal to 1"),
    ({**RANDOM, "evict_after_tokens": -1}, "`evict_after_tokens`=-1: .*equal to 0"),
    ({**RANDOM, "sinks": -1}, "`sinks`=-1: .*greater than or equal to 0"),
    ({**RANDOM, "recent": 0}, "`recent`=0: .*greater than or equal to 1"),
    ({**RANDOM, "protect_prompt": "maybe"}, "`protect_prompt`='maybe': .*boolean"),
    ({"policy": "random"}, "`policy`='random' evicts nothing without a limit: set `budget_tokens`"),
    ({"budget_tokens": 64}, "`budget_tokens` and `keep_ratio` have no effect .*keep_all: name"),
    ({"keep_ratio": 0.5}, "have no effect with policy keep_all: name a policy .*`policy`"),
    (
        {"policy": "random", "budget_tokens": 35},
        "`budget_tokens`=35 is smaller than the 36 tokens .*raise it to at least 36, or lower",
    ),
]
REFUSED_OF_A_REPLICA = [
    ({"backend": "in_place"}, "`backend`='in_place': .*'lazy_compaction'"),
    ({"reclaim": "never"}, "`reclaim`='never': .*'pressure', 'eager' or 'adaptive'"),
    ({"theta_f": 1}, "`theta_f`=1: .*less than 1"),
    ({"headroom": 0.5}, "`headroom`=0.5: .*less than 0.5"),
    ({"low_water": 1}, "`low_water`=1: .*less than 1"),
    ({"batch_blocks": 1}, "`batch_blocks`=1: .*greater than or equal to 2"),
    ({"check": "perhaps"}, "`check`='perhaps': .*boolean"),
    ({"audit_dir": 7}, "`audit_dir`=7: .*string"),
    ({"probe_layers": -1}, "`probe_layers`=-1: .*greater than or equal to 0"),
    ({"probe_queries": 0}, "`probe_queries`=0: .*greater than or equal to 1"),
    ({"head_reduction": "sum"}, "`head_reduction`='sum': .*'mean' or 'max'"),
    (
        {"policy": "h2o", "budget_tokens": 64, "probe": False},
        "`policy`='h2o' looks at attention_mass, .* not measure: start it with `probe`=true",
    ),
]


@pytest.mark.parametrize(("raw", "message"), REFUSED + REFUSED_OF_A_REPLICA)
def test_a_wrong_option_of_a_replica_is_named_with_the_way_out(
    raw: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        parse_replica_options(raw)


@pytest.mark.parametrize(("raw", "message"), REFUSED)
def test_a_wrong_option_of_a_request_is_named_by_the_key_that_was_sent(
    raw: dict[str, Any], message: str
) -> None:
    sent = {f"vtoken.{name}": value for name, value in raw.items()}
    with pytest.raises(OptionError, match=message.replace("`", "`(vtoken.)?")) as refused:
        parse_request_options(sent, ReplicaOptions())
    if raw != {"policy": "h3o"}:
        assert "`vtoken." in str(refused.value)


@pytest.mark.parametrize(
    "option", sorted(set(ReplicaOptions.model_fields) - set(EvictionOptions.model_fields))
)
def test_an_option_of_the_replica_is_none_of_a_request(option: str) -> None:
    with pytest.raises(OptionError, match=f"`vtoken.{option}` is not an option"):
        parse_request_options({f"vtoken.{option}": 1}, ReplicaOptions())


def test_several_mistakes_are_all_named() -> None:
    with pytest.raises(OptionError, match=r"`sinks`.*; `recent`"):
        parse_replica_options({"sinks": -1, "recent": 0})


def test_a_nested_entry_is_refused_with_the_flat_form() -> None:
    with pytest.raises(OptionError, match=r"flat keys such as `vtoken.policy`"):
        parse_request_options({"vtoken": '{"policy": "random"}'}, ReplicaOptions())


def test_nothing_given_means_keep_all() -> None:
    assert parse_replica_options(None) == ReplicaOptions()
    assert not parse_replica_options({}).evicts


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {"policy": "random"}])
def test_a_request_without_our_keys_gets_the_replicas_defaults(extra: Any) -> None:
    replica = parse_replica_options({**RANDOM, "tick_tokens": 7})
    options = parse_request_options(extra, replica)
    assert type(options) is EvictionOptions
    assert (options.policy, options.budget_tokens, options.tick_tokens) == ("random", 64, 7)


def test_a_request_changes_only_what_it_names() -> None:
    replica = parse_replica_options({**RANDOM, "tick_tokens": 7})
    options = parse_request_options({"vtoken.seed": 3}, replica)
    assert (options.seed, options.budget_tokens, options.tick_tokens) == (3, 64, 7)


@pytest.mark.parametrize(
    ("own", "limits"),
    [
        ({"keep_ratio": 0.5}, (None, 0.5)),
        ({"budget_tokens": 100}, (100, None)),
        ({"budget_tokens": 100, "keep_ratio": 0.5}, (100, 0.5)),
        ({"policy": "keep_all"}, (None, None)),
        ({"policy": "streaming_llm"}, (64, 0.25)),
    ],
)
def test_a_limit_of_a_request_replaces_both_limits_of_the_replica(
    own: dict[str, Any], limits: tuple[int | None, float | None]
) -> None:
    replica = parse_replica_options({**RANDOM, "keep_ratio": 0.25})
    sent = {f"vtoken.{name}": value for name, value in own.items()}
    options = parse_request_options(sent, replica)
    assert (options.budget_tokens, options.keep_ratio) == limits


def test_numbers_may_come_as_strings() -> None:
    options = parse_request_options(
        {"vtoken.policy": "random", "vtoken.budget_tokens": "64"}, ReplicaOptions()
    )
    assert options.budget_tokens == 64


@pytest.mark.parametrize(
    ("limits", "length", "target"),
    [
        ({}, 100, 100),
        ({"budget_tokens": 64}, 100, 64),
        ({"budget_tokens": 64}, 10, 10),
        ({"keep_ratio": 0.5}, 101, 51),
        ({"keep_ratio": 0.7}, 10, 7),
        ({"keep_ratio": 0.1}, 1, 1),
        ({"keep_ratio": 1.0}, 100, 100),
        ({"budget_tokens": 64, "keep_ratio": 0.5}, 100, 50),
        ({"budget_tokens": 64, "keep_ratio": 0.5}, 1000, 64),
    ],
)
def test_the_live_target_is_the_smaller_limit_and_a_ratio_rounds_up(
    limits: dict[str, Any], length: int, target: int
) -> None:
    assert EvictionOptions(policy="random", **limits).live_target(length) == target


@pytest.mark.parametrize("percent", range(1, 101))
def test_every_percentage_of_a_round_length_is_exact(percent: int) -> None:
    options = EvictionOptions(policy="random", keep_ratio=percent / 100)
    assert options.live_target(100) == percent
    assert options.live_target(100_000) == percent * 1000


@pytest.mark.parametrize(
    ("raw", "probes"),
    [
        ({}, False),
        (RANDOM, False),
        ({"policy": "h2o", "budget_tokens": 64}, True),
        ({"probe": True}, True),
        (RANDOM | {"probe": True}, True),
    ],
)
def test_a_replica_measures_if_its_policy_needs_it_or_it_is_told_to(
    raw: dict[str, Any], probes: bool
) -> None:
    replica = parse_replica_options(raw)
    assert replica.probes == probes
    wanted = {"vtoken.policy": "tova", "vtoken.budget_tokens": 64}
    if probes:
        assert parse_request_options(wanted, replica).policy == "tova"
    else:
        with pytest.raises(OptionError, match=r"`vtoken.policy`='tova' looks at last_mass, which"):
            parse_request_options(wanted, replica)


@pytest.mark.parametrize(
    ("replica", "sent", "policy"),
    [
        ({}, {"recent_share": 0.25}, H2O(sinks=4, recent_share=0.25)),
        ({"recent_share": 0.75}, {}, H2O(sinks=4, recent_share=0.75)),
        ({"recent_share": 0.75}, {"recent_share": "0.25"}, H2O(sinks=4, recent_share=0.25)),
    ],
)
def test_a_policys_own_knobs_reach_it(
    replica: dict[str, Any], sent: dict[str, Any], policy: H2O
) -> None:
    parsed = parse_replica_options({"policy": "h2o", "budget_tokens": 64, "policy_knobs": replica})
    own = {f"vtoken.policy_knobs.{name}": value for name, value in sent.items()}
    assert parse_request_options(own, parsed).scorer == policy


def test_another_policy_has_other_knobs() -> None:
    knobs = {"recent_share": 0.75}
    replica = parse_replica_options({"policy": "h2o", "budget_tokens": 64, "policy_knobs": knobs})
    options = parse_request_options({"vtoken.policy": "snapkv"}, replica)
    assert options.scorer == SnapKV(sinks=4)
    sent = {"vtoken.policy": "snapkv", "vtoken.policy_knobs.kernel": 7}
    assert parse_request_options(sent, replica).scorer == SnapKV(sinks=4, kernel=7)


@pytest.mark.parametrize(
    ("policy", "knob", "value", "reason"),
    [
        ("h2o", "recnt", 0.5, "no knob recnt; known: recent_share"),
        ("tova", "window", 1, "no knob window; known: none"),
        ("tova", "seed", 1, "no knob seed"),
        ("h2o", "recent_share", 1.5, "from 0 to 1"),
        ("h2o", "recent_share", "much", "much"),
        ("h2o", "recent_share", float("nan"), "from 0 to 1"),
        ("snapkv", "kernel", 4, "odd"),
        ("snapkv", "kernel", 10**9 + 1, "odd"),
    ],
)
def test_a_wrong_knob_is_refused(policy: str, knob: str, value: Any, reason: str) -> None:
    replica = parse_replica_options({"probe": True})
    sent = {"vtoken.policy": policy, "vtoken.budget_tokens": 64}
    with pytest.raises(OptionError, match=reason):
        parse_request_options(sent | {f"vtoken.policy_knobs.{knob}": value}, replica)
