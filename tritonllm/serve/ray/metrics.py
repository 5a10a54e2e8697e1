"""The pages of several replicas for Prometheus, as one."""

from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


class _Read:
    """What was read, for :func:`generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families


def together(pages: Iterable[tuple[str, bytes]]) -> tuple[str, bytes]:
    """One page, in which each sample has the name of its replica as the label ``replica``.

    Args:
        pages: names of replicas, and what each tells.

    Returns:
        Content type and page.
    """
    families: dict[str, Metric] = {}
    for name, page in sorted(pages):
        for family in text_string_to_metric_families(page.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [sample._replace(labels={**sample.labels, "replica": name}) for sample in family.samples]
    registry = CollectorRegistry()
    registry.register(_Read(families.values()))
    return CONTENT_TYPE_LATEST, generate_latest(registry)
