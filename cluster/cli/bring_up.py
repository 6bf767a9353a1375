"""From nothing to a mesh that answers: weights, processes, histories. What is there already is used again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.cli.catalogue import Catalogue
from cluster.cli.client import Client
from cluster.cli.steps import Steps
from cluster.cli.training_view import in_words
from cluster.config import DEFAULT_PATH, MeshConfig, load_mesh
from cluster.histories import HistorySource
from cluster.loading import HistoryRequest
from cluster.local import Mesh
from cluster.weights import QUICK_CONFIG, Choice, find_trained, one_trainer, weights_url
from services.ingress.directory import ModelsBody
from shared.errors import RankMeshError
from shared.settings import Settings, load_settings
from shared.weights import WeightStore
from training.config import TrainConfig, load_train_config


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be brought up.

    Args:
        mesh: The mesh.
        train: How its weights are made when they are not there.
        train_path: File of ``train``.
        settings: Folders.
    """

    mesh: MeshConfig
    train: TrainConfig
    train_path: Path
    settings: Settings

    @classmethod
    def of(
        cls, name: str | None, port: int | None, config: Path | None, train: Path | None, weights: str | None = None
    ) -> Plan:
        """Read the files that a command line names; ``weights`` takes the place of the deployment file's version.

        Raises:
            ConfigError: a file breaks a rule, a mesh of that name runs already, a port is taken, or others could reach
                it without a token.
        """
        settings = load_settings()
        mesh = load_mesh(config or DEFAULT_PATH, name, port)
        if weights is not None:
            mesh = mesh.model_copy(update={"weights": mesh.weights.model_copy(update={"version": weights})})
        train_path = train or QUICK_CONFIG
        return cls(Mesh.prepare(mesh, settings.var_dir), load_train_config(train_path), train_path, settings)


@dataclass(frozen=True, slots=True)
class Running:
    """A mesh that answers, and what it publishes.

    Args:
        mesh: The mesh.
        catalogue: Names and sample requests of its weights.
    """

    mesh: Mesh
    catalogue: Catalogue


def bring_up(plan: Plan, steps: Steps, *, detached: bool) -> Running:
    """Bring a mesh up, telling each step.

    Args:
        plan: What.
        steps: Told of it.
        detached: Leave it running when this process ends.

    Raises:
        RankMeshError: a step failed; nothing is left running.
    """
    store = WeightStore(weights_url(plan.mesh, plan.settings.var_dir))
    choice = _weights(plan, store, steps)
    reader = store.open(choice.version)
    catalogue = Catalogue.from_documents(reader.json("samples"), reader.json("display"))
    config = plan.mesh.model_copy(update={"weights": plan.mesh.weights.model_copy(update={"version": choice.version})})
    histories = _histories(catalogue, config, TrainConfig.model_validate(choice.metrics["train"]), plan.settings)
    with steps.step("mesh", "starting") as step:
        mesh = Mesh.start(
            config,
            detached=detached,
            var_dir=plan.settings.var_dir,
            on_progress=step.doing,
            histories=histories,
        )
        step.done(f"{len(mesh.processes())} processes, {mesh.url}{_kernels(mesh.url)}")
    steps.also("histories", mesh.histories)  # loaded by the mesh itself, before its stations started
    return Running(mesh, catalogue)


def _histories(catalogue: Catalogue, config: MeshConfig, train: TrainConfig, settings: Settings) -> HistoryRequest:
    """Return what a server may know of every user of the weights' data set."""
    return HistoryRequest(
        source=HistorySource(catalogue.dataset, catalogue.provenance, catalogue.as_of_s, config.user_log().max_events),
        seed=train.seed,
        synthetic=train.synthetic,
        data_dir=settings.data_dir.absolute(),
    )


def _kernels(url: str) -> str:
    """Return what the ranking stations run the network with, as they say themselves; nothing where none has said."""
    try:
        with Client(url) as client:
            models = client.fetch(ModelsBody, "/v1/models").models
    except RankMeshError:
        return ""  # a mesh that is up is not ended for the want of a word about it
    said = {text.partition(" (")[0] for model in models for name, text in model.execution.items() if "ranking" in name}
    return f", kernels: {', '.join(sorted(said))}" if said else ""


def _weights(plan: Plan, store: WeightStore, steps: Steps) -> Choice:
    if plan.mesh.weights.version != "latest":
        version = plan.mesh.weights.version
        return Choice(version, store.open(version).json("metrics"), is_new=False)
    if (found := _trained(plan, store, steps)) is not None:
        return found
    told = f"another process trains with {plan.train_path}; waiting, to use what it publishes"
    with one_trainer(plan.settings.var_dir, plan.train, lambda: steps.note(told)) as waited:
        # Looked at again in any case: another one may have published between the look above and the lock.
        found = _trained(plan, store, steps) if waited else find_trained(store, plan.train)
        return found or _train(plan, store, steps)


def _trained(plan: Plan, store: WeightStore, steps: Steps) -> Choice | None:
    with steps.step("model", "looking for trained weights") as step:
        found = find_trained(store, plan.train)
        if found is None:
            step.absent(f"none yet of {plan.train_path}")
        else:
            step.done(in_words(found))
    return found


def _train(plan: Plan, store: WeightStore, steps: Steps) -> Choice:
    from training.data import load_dataset

    with steps.step("data", f"fetching {plan.train.dataset}") as step:
        dataset = load_dataset(
            plan.train.dataset,
            plan.settings.data_dir,
            seed=plan.train.seed,
            synthetic=plan.train.synthetic,
            synthetic_fallback=plan.train.synthetic_fallback,
        )
        counts = f"{len(dataset.users):,} users, {len(dataset.catalog):,} items, {len(dataset.log):,} events"
        step.done(f"{dataset.name}: {counts}")
    if dataset.name != plan.train.dataset:
        steps.note(dataset.provenance)
    del dataset
    with steps.step("train", f"{plan.train_path}, once; later runs use it again", spinner=False) as step:
        from training.loop import train_and_publish

        try:
            version = train_and_publish(
                plan.train_path, plan.settings.data_dir, weights_url(plan.mesh, plan.settings.var_dir), steps.console
            )
        except KeyboardInterrupt:
            steps.note("stopped, nothing published")
            raise
        choice = Choice(version, store.open(version).json("metrics"), is_new=True)
        step.done(in_words(choice))
    with steps.step("kernels", "searching the fastest execution of this model on this machine") as step:
        from cluster.cli.tune import tune_version

        result = tune_version(store.open(version), plan.mesh, plan.settings.var_dir)
        step.done(f"{result.winner.replace('_', ' ')}, the fastest of {len(result.outcomes)} that were tried")
    return choice
