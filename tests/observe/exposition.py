"""What a scraper reads."""

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(text: bytes) -> Samples:
    """The value of each series, by name and labels; one that comes twice is an error."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples, f"{key} comes twice"
            samples[key] = sample.value
    return samples


def kinds_of(text: bytes) -> dict[str, str]:
    """The type of each metric, by its name without what its series add for their kind."""
    return {family.name: family.type for family in text_string_to_metric_families(text.decode())}


def value(samples: Samples, name: str, labels: Mapping[str, str] | None = None) -> float:
    return samples[name, frozenset((labels or {}).items())]


def buckets_of(samples: Samples, name: str) -> dict[float, float]:
    """Of a histogram, whatever its other labels are."""
    return {
        float(dict(labels)["le"]): count
        for (sample, labels), count in samples.items()
        if sample == f"{name}_bucket"
    }
