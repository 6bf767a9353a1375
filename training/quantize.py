"""``rankmesh quantize``: measures what each layer gains and loses in low precision on this device, writes a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kernels.native import status
from models.calibration import Calibration
from models.execution import FusedNetwork, choose_execution, executed
from models.heads import CLICK, probabilities
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork, State
from models.quantize.choose import GAIN_MIN, Choice, choose, options
from models.quantize.formats import FORMATS, Format, formats_of_device
from models.quantize.measure import ROUNDS, eligible_layers, time_layers, with_formats
from models.quantize.plan import SCORE_ERROR_MAX, LayerEvidence, PrecisionPlan, device_name, shapes_digest
from models.random_request import random_candidates, random_state
from models.ranker import RequestTensors
from models.tuning import executions_of
from shared.clock import Clock, SystemClock
from shared.errors import ConfigError
from shared.weights import WeightStore
from training.data import Dataset, HistoryReader, Rows, request_batches
from training.evaluate import dataset_of
from training.metrics import Metrics
from training.model import TrainedModel

NE_BUDGET = 2e-4
"""Largest relative change of NE, 0.02 %."""

CANDIDATE_COUNTS = (100, 500, 1000)

HELD_OUT_ROWS = 20_000

_OBEYED = "replicas obey a plan when execution.backend is auto and execution.precision is bfloat16 or auto"
_BATCH_ROWS = 4096

Scores = dict[int, npt.NDArray[np.float32]]
"""depth -> probabilities float32 [N, O]."""

Executed: TypeAlias = RankingNetwork | FusedNetwork
"""What runs a network on a replica."""


@dataclass(frozen=True, slots=True)
class _Batch:
    state: State
    pooled: Tensor
    counters: Tensor
    layout: CandidateLayout


class HeldOut:
    """Held-out rows whose request side is computed once: what the damage of formats is measured on.

    Args:
        model: The model; its network is put into formats and back.
        dataset: Its data.
        rows: Rows that training has not seen.
    """

    def __init__(self, model: TrainedModel, dataset: Dataset, rows: Rows) -> None:
        self.network: RankingNetwork = model.ranker.network
        self._calibration: Calibration = model.calibration
        self._rows = rows
        reader = HistoryReader(dataset.log, model.ranker.config.history_length, "strict", align="right")
        self._batches = []
        with torch.inference_mode():
            for batch in request_batches(rows, reader, _BATCH_ROWS):
                candidates = model.index.candidates(batch.candidates, streaming=False)
                self._batches.append(
                    _Batch(
                        model.ranker.encode(RequestTensors.of(model.index.requests(batch))),
                        model.ranker.pool(candidates),
                        candidates.counters,
                        CandidateLayout.of(torch.from_numpy(batch.request_index), batch.num_requests),
                    )
                )
        self.plain = self.scores({})

    @torch.inference_mode()
    def scores(self, layers: Mapping[str, Format]) -> Scores:
        """Return the scores of every exit with some layers in formats."""
        undo = with_formats(self.network, layers)
        parts: dict[int, list[npt.NDArray[np.float32]]] = {depth: [] for depth in self.network.config.exits}
        try:
            for batch in self._batches:
                logits, _ = self.network.all_depths(batch.state, batch.pooled, batch.counters, None, None, batch.layout)
                for depth, found in parts.items():
                    found.append(probabilities(self._calibration.apply(logits[depth].numpy(), depth)))
        finally:
            undo()
        return {depth: np.concatenate(found) for depth, found in parts.items()}

    @torch.inference_mode()
    def scores_of(self, network: Executed) -> Scores:
        """Return the scores of every exit by the same network in another form."""
        return {
            depth: np.concatenate(
                [
                    probabilities(self._calibration.apply(logits.numpy(), depth))
                    for batch in self._batches
                    for logits in [
                        network.full_pass(batch.state, batch.pooled, batch.counters, None, None, batch.layout, depth)
                    ]
                ]
            )
            for depth in self.plain
        }

    def change(self, layers: Mapping[str, Format]) -> float:
        """Return the relative change of the click's NE with some layers in formats: the largest of the exits."""
        return self.change_of(self.scores(layers))

    def change_of(self, found: Scores) -> float:
        """Return the relative change of the click's NE with other scores: the largest of the exits."""
        changes = [self._ne(found[depth]) / self._ne(plain) - 1 for depth, plain in self.plain.items()]
        return max(changes, key=abs)

    def score_error(self, layers: Mapping[str, Format]) -> float:
        """Return the largest difference of a score to float32."""
        found = self.scores(layers)
        return max(float(np.abs(found[depth] - plain).max(initial=0)) for depth, plain in self.plain.items())

    def _ne(self, scores: npt.NDArray[np.float32]) -> float:
        return Metrics.of(scores[:, CLICK], self._rows.click, self._rows.user_index).ne


def make_plan(
    held_out: HeldOut,
    version: str,
    clock: Clock | None = None,
    budget: float = NE_BUDGET,
    counts: Sequence[int] = CANDIDATE_COUNTS,
    rounds: int = ROUNDS,
) -> PrecisionPlan:
    """Measure, choose and check.

    Args:
        held_out: The model on held-out rows.
        version: Its weights version.
        clock: Measures.
        budget: Largest absolute relative change of NE, of each choice's sum and of all together.
        counts: Numbers of candidates that layers are timed at.
        rounds: Repeats of a timing.
    """
    clock = clock or SystemClock()
    network = held_out.network
    layers = eligible_layers(network)
    skipped = {name: why for name, why in formats_of_device(clock).items() if why}
    formats: list[Format] = [name for name in FORMATS if name not in skipped]
    seconds = time_layers(layers, formats, counts, clock, rounds)
    changes: dict[str, dict[Format, float]] = {name: {} for name in layers}

    def damage(name: str, number_format: Format) -> float:
        changes[name][number_format] = held_out.change({name: number_format})
        return changes[name][number_format]

    choice = choose(options(seconds, damage), held_out.change, budget)
    variants: dict[str, Mapping[str, Format]] = {"fp32": {}, "plan": choice.layers}
    if "bf16_packed" in formats:
        variants["bf16"] = dict.fromkeys(layers, "bf16_packed")
    stacks = _executions(network, "bf16_packed" in formats)
    stack_changes = {name: held_out.change_of(held_out.scores_of(stack)) for name, stack in stacks.items()}
    passes = _time_passes(network, variants, stacks, counts, clock, rounds)
    # A replica without a plan runs the fastest of these (``rankmesh tune``); one that loses more than the budget is no
    # rival to a plan that keeps it.
    rivals = [passes[name] for name in stacks if abs(stack_changes[name]) <= budget]
    if choice.layers and passes["plan"] >= (1 - GAIN_MIN / 2) * min([passes["fp32"], *rivals]):
        # Alone a layer's time fits its caches; in the whole pass the casts between formats may eat what it saves.
        choice = _taken_back(choice)
    score_error = held_out.score_error(choice.layers) if choice.layers else 0.0
    if score_error > SCORE_ERROR_MAX:  # no replica would obey it
        choice, score_error = _taken_back(choice), 0.0
    return PrecisionPlan(
        version=version,
        device=device_name(),
        shapes=shapes_digest(network.config),
        threads=torch.get_num_threads(),
        candidate_counts=tuple(counts),
        ne_budget=budget,
        ne_change=choice.change,
        score_error_max=score_error,
        layers=choice.layers,
        skipped_formats=skipped,
        rolled_back=choice.rolled_back,
        pass_seconds=passes,
        without_plan=_without_plan(stacks),
        stack_ne_changes=stack_changes,
        evidence={
            name: LayerEvidence(
                shape=(linear.out_features, linear.in_features), seconds=seconds[name], ne_changes=changes[name]
            )
            for name, linear in layers.items()
        },
    )


def _taken_back(choice: Choice) -> Choice:
    return Choice({}, 0.0, (*choice.rolled_back, *choice.layers))


def quantize_version(
    store: WeightStore,
    version: str,
    data_dir: Path,
    folder: Path,
    budget: float,
    console: Console,
    progress_console: Console,
) -> PrecisionPlan:
    """Make the plan of a published version for this device, show it and write it to a folder.

    Args:
        store: Where the version is.
        version: What the plan is for.
        data_dir: Folder of fetched data.
        folder: Where the plan goes; made first, so that what cannot be written is not measured.
        budget: See ``make_plan``.
        console: Where the plan is shown.
        progress_console: Where it is told what is done meanwhile.

    Raises:
        ConfigError: the model has biases.
        DataUnavailableError: the data cannot be had.
        OSError: the folder cannot be made.
        WeightsError: the weights do not fit their model.
    """
    reader = store.open(version)
    folder.mkdir(parents=True, exist_ok=True)
    dataset = dataset_of(reader, data_dir)
    model = TrainedModel.from_weights(reader, dataset)
    if model.ranker.config.bias:
        raise ConfigError(f"weights {version} have biases, low precision has none", field="model.bias", value="true")
    rows = dataset.split.valid
    rows = rows.select(slice(max(len(rows) - HELD_OUT_ROWS, 0), len(rows)))
    torch.set_num_threads(1)
    progress_console.print(f"scoring {len(rows):,} held-out rows in float32", style="dim")
    held_out = HeldOut(model, dataset, rows)
    progress_console.print("timing each layer in each format, and what it loses on these rows", style="dim")
    plan = make_plan(held_out, version, budget=budget)
    show_plan(plan, console)
    console.print(f"wrote {plan.write(folder)}", soft_wrap=True)
    console.print(_OBEYED, style="dim")
    return plan


def show_plan(plan: PrecisionPlan, console: Console) -> None:
    """Print layer by layer what was measured and chosen, and what it comes to."""
    console.print(f"[bold]{plan.version}[/bold] on {plan.device}, {plan.threads} thread(s)")
    console.print(_times_table(plan))
    console.print(_choices_table(plan))
    for number_format, why in plan.skipped_formats.items():
        console.print(f"not measured: {number_format}: {why}")
    if plan.rolled_back:
        console.print(f"chosen and taken back: {', '.join(plan.rolled_back)}")
    if not plan.layers:
        console.print(f"nothing pays here: a replica that may choose runs {plan.without_plan}, without a plan")
    passes = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in plan.pass_seconds.items())
    console.print(f"whole full pass, {'+'.join(map(str, plan.candidate_counts))} candidates: {passes}")
    for name, lost in plan.stack_ne_changes.items():
        mark = ", what a replica that may choose runs without a plan" if name == plan.without_plan else ""
        console.print(f"{name}: NE {lost:+.2e} relative{mark}")
    console.print(
        f"NE {plan.ne_change:+.2e} relative, budget {plan.ne_budget:g}; score error {plan.score_error_max:.1e}"
    )


def _times_table(plan: PrecisionPlan) -> Table:
    """Return the times by shape: layers of one shape share theirs."""
    shapes = {found.shape: found.seconds for found in plan.evidence.values()}
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("shape, µs", no_wrap=True)
    for number_format in next(iter(shapes.values()), {}):
        table.add_column(number_format, justify="right", no_wrap=True)
    for shape, seconds in shapes.items():
        table.add_row(_sizes(shape), *(f"{spent_s * 1e6:,.0f}" for spent_s in seconds.values()))
    return table


def _choices_table(plan: PrecisionPlan) -> Table:
    """Return the format of each layer, and what it alone loses."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("layer", no_wrap=True)
    for name in ("shape", "chosen", "NE change"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, found in plan.evidence.items():
        chosen = plan.layers.get(name, "fp32")
        change = f"{found.ne_changes[chosen]:+.1e}" if chosen in found.ne_changes else ""
        table.add_row(name, _sizes(found.shape), chosen, change)
    return table


def _sizes(shape: tuple[int, int]) -> str:
    return "x".join(map(str, shape))


def _executions(network: RankingNetwork, with_bfloat16: bool) -> dict[str, FusedNetwork]:
    """Return the packed forms that a replica of this machine may run instead of a plan; none for a network without."""
    found: dict[str, FusedNetwork] = {}
    for execution in executions_of("auto"):
        if execution.backend == "native" and not status().available:
            continue
        if execution.precision == "bfloat16" and not with_bfloat16:
            continue
        try:
            runs = executed(network, execution)
        except ConfigError:
            continue
        if isinstance(runs, FusedNetwork):
            found[execution.name] = runs
    return found


def _without_plan(stacks: Mapping[str, FusedNetwork]) -> str:
    """Return the name of what a replica of this machine runs without a plan and without a search."""
    name = choose_execution().name
    return name if name in stacks else "fp32"


@torch.inference_mode()
def _time_passes(
    network: RankingNetwork,
    variants: Mapping[str, Mapping[str, Format]],
    stacks: Mapping[str, FusedNetwork],
    counts: Sequence[int],
    clock: Clock,
    rounds: int,
) -> dict[str, float]:
    """Time the whole full pass in each variant's formats and in each packed form, in turn in each round.

    Returns:
        Name -> seconds, summed over the counts.
    """
    generator = torch.Generator().manual_seed(0)
    state = random_state(network, generator)
    inputs = [random_candidates(network.config, count, generator) for count in counts]

    def spent_s(runs: Executed) -> float:
        begin_s = clock.monotonic_s()
        for pooled, counters, layout in inputs:
            runs.full_pass(state, pooled, counters, None, None, layout)
        return clock.monotonic_s() - begin_s

    seconds: dict[str, list[float]] = {name: [] for name in (*variants, *stacks)}
    for _ in range(rounds + 1):
        for name, layers in variants.items():
            undo = with_formats(network, layers)
            seconds[name].append(spent_s(network))
            undo()
        for name, stack in stacks.items():
            seconds[name].append(spent_s(stack))
    # The first round warms up.
    return {name: float(np.median(values[1:])) for name, values in seconds.items()}
