# SPDX-License-Identifier: Apache-2.0
"""Joins the Prometheus pages of several replicas into one."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def join_pages(pages: Mapping[str, str]) -> bytes:
    """One page with every sample of `pages` (replica name -> text) labelled with its replica.

    Without the label a scrape would show whichever replica happened to answer, and its counters
    would run backwards from one scrape to the next.
    """
    registry = CollectorRegistry()
    registry.register(_Joined(pages))
    return generate_latest(registry)


class _Joined(Collector):
    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in sorted(self._pages.items()):
            for family in text_string_to_metric_families(text):
                joined = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                joined.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in family.samples
                ]
        return families.values()
