# SPDX-License-Identifier: Apache-2.0
import pytest

from cluster.settings import SettingsError, parse_settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_ongoing_request": 7}, "max_ongoing_request: Extra inputs"),
        ({"replicas": 0}, "replicas: Input should be greater"),
        ({"options": {"polici": "random"}}, "`polici` is not an option"),
        ({"options": {"policy": "random"}}, "evicts nothing without a limit"),
        ({"engine": {"scheduler_cls": "x"}}, "engine: scheduler_cls cannot be set here"),
        ({"gpus_per_replica": 2}, "gpus_per_replica: tensor parallelism is not supported"),
        ({"engine": {"tensor_parallel_size": 2}}, "tensor parallelism is not supported"),
    ],
)
def test_mistake_is_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_settings({"model": "m", **values})


def test_missing_model_is_refused() -> None:
    with pytest.raises(SettingsError, match="model: Field required"):
        parse_settings({})


def test_engine_arguments_carry_the_names() -> None:
    settings = parse_settings(
        {"model": "/models/m", "served_model_name": "m", "engine": {"max_model_len": 64}}
    )
    assert settings.engine_args() == {
        "model": "/models/m",
        "served_model_name": ["m"],
        "max_model_len": 64,
    }
    assert settings.api_name == "m"


def test_stock_may_be_parallel() -> None:
    assert parse_settings({"model": "m", "options": None, "gpus_per_replica": 2})


def test_null_options_mean_stock_and_absent_ones_vtoken() -> None:
    assert parse_settings({"model": "m", "options": None}).options is None
    assert parse_settings({"model": "m"}).options == {}
