"""A synthetic data set that is made in milliseconds, once a process."""

from __future__ import annotations

from functools import cache

from training.data.dataset import Dataset
from training.data.synthetic import SyntheticConfig, load_synthetic


@cache
def tiny_dataset() -> Dataset:
    """Return 12,000 impressions of 150 users over 300 ads; short and long histories both occur in its test split."""
    config = SyntheticConfig(num_events=12_000, num_users=150, num_ads=300, num_groups=20, activity=0.02)
    return load_synthetic(config, seed=11)
