# SPDX-License-Identifier: Apache-2.0
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.exposition import join_pages


def page(value: int) -> str:
    registry = CollectorRegistry()
    Gauge("vtoken_blocks", "Blocks", ["state"], registry=registry).labels("free").set(value)
    Counter("plans", "Plans", registry=registry).inc(value)
    Histogram("step_seconds", "Steps", buckets=(1, 2), registry=registry).observe(value)
    return generate_latest(registry).decode()


def test_every_sample_names_its_replica() -> None:
    lines = join_pages({"b": page(2), "a": page(1)}).decode().splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all('replica="a"' in line or 'replica="b"' in line for line in samples)
    assert 'vtoken_blocks{replica="a",state="free"} 1.0' in samples
    assert 'vtoken_blocks{replica="b",state="free"} 2.0' in samples
    assert 'plans_total{replica="b"} 2.0' in samples


def test_families_keep_their_types_and_appear_once() -> None:
    lines = join_pages({"a": page(1), "b": page(2)}).decode().splitlines()
    types = [line for line in lines if line.startswith("# TYPE")]
    assert "# TYPE plans_total counter" in types
    assert "# TYPE step_seconds histogram" in types
    assert "# TYPE vtoken_blocks gauge" in types
    assert len(types) == len(set(types))
