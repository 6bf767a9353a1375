"""Configuration of training: data, model, optimiser, the speculative input."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from models.config import RankerConfig
from shared.config import Config, load_config, read_document, validated
from training.data import DatasetName, HistoryStoreConfig, SyntheticConfig


class OptimizerConfig(Config):
    """Adam over one pass.

    Args:
        network_rate: Peak learning rate of the dense network.
        candidate_share: Share of it that the candidate side's maps and the heads of the exits have. Corrections are
            small, and at the whole rate more of the heads' hidden units end closed for every row (43 of 64 at the
            deepest exit against 27, quick model, seed 0).
        table_rate: Peak learning rate of the embedding tables.
        warmup_steps: Steps in which both rise from 0.
        final_share: Share of the peak that is left at the end of the linear decay.
        gradient_norm_max: Gradients of the network are scaled down to this norm.
    """

    network_rate: float = Field(2e-3, gt=0)
    candidate_share: float = Field(0.3, gt=0)
    table_rate: float = Field(2e-3, gt=0)
    warmup_steps: int = Field(50, ge=0)
    final_share: float = Field(0.1, ge=0, le=1)
    gradient_norm_max: float = Field(10.0, gt=0)


class LossConfig(Config):
    """Weights of the parts of the loss; the deepest exit's click likelihood has 1.

    Args:
        conversion: Likelihood of a conversion given the click, on clicked rows.
        first_pass: The same two for the first pass.
        inner_exits: The same two for each exit before the deepest.
        speculative: What a linear reading of the speculative embedding says; trains that head alone.
    """

    conversion: float = Field(1.0, ge=0)
    first_pass: float = Field(0.3, ge=0)
    inner_exits: float = Field(0.3, ge=0)
    speculative: float = Field(0.1, ge=0)


class DropoutConfig(Config):
    """Ids that are replaced by the out-of-vocabulary row while training, so that this row learns to stand in.

    Args:
        user: Share of requests whose user is hidden.
        item: Share of candidates, and of events, whose item is hidden.
    """

    user: float = Field(0.1, ge=0, le=1)
    item: float = Field(0.01, ge=0, le=1)


class SpeculativeTrainingConfig(Config):
    """How training imitates the speculative cache.

    Args:
        batch_share: Share of batches with speculative embeddings; the others have none.
        exact_share: Share of such a batch's candidates that get their own stale embedding.
        user_share: Share that gets the mean over earlier rows of the same user and ad group.
        stale_events_max: A stale embedding was made 1 to this many events earlier.
    """

    batch_share: float = Field(0.25, ge=0, le=1)
    exact_share: float = Field(0.4, ge=0, le=1)
    user_share: float = Field(0.3, ge=0, le=1)
    stale_events_max: int = Field(16, ge=1)


class TrainConfig(Config):
    """One training run.

    Args:
        name: Name of the run.
        dataset: Data set.
        synthetic_fallback: Whether the synthetic log may stand in for data that cannot be fetched.
        synthetic: The synthetic log.
        seed: Seed of weights, dropout and the synthetic log.
        threads: Threads of torch, 0: one a core.
        batch_rows: Most rows of a batch.
        train_share: Newest share of the training rows that is used; 1: all.
        histories: User log from which the rows' histories are joined, as serving reads them; None: the data set's own
            log, which gives the same ones.
        model: The ranker.
        optimizer: Optimiser.
        loss: Loss.
        dropout: Hidden ids.
        speculative: Speculative input.
    """

    name: str
    dataset: DatasetName = "ml-1m"
    synthetic_fallback: bool = True
    synthetic: SyntheticConfig = SyntheticConfig()
    seed: int = 0
    threads: int = Field(0, ge=0, le=256)
    batch_rows: int = Field(1024, ge=1)
    train_share: float = Field(1.0, gt=0, le=1)
    histories: HistoryStoreConfig | None = None
    model: RankerConfig = RankerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    dropout: DropoutConfig = DropoutConfig()
    speculative: SpeculativeTrainingConfig = SpeculativeTrainingConfig()


def load_train_config(path: Path) -> TrainConfig:
    """Read a training configuration; its ``model`` names a model file relative to it, or holds the model itself.

    Raises:
        ConfigError: a file cannot be read or breaks a rule.
    """
    document = read_document(path)
    if isinstance(model := document.get("model"), str):
        load_config(RankerConfig, path.parent / model)  # on its own first: what is wrong there is that file's
        document["model"] = read_document(path.parent / model)
    return validated(TrainConfig, document, path)
