"""The benchmarks by name; names of benchmarks and metrics are fixed, since figures of different days meet by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TypeAlias, cast

from benchmarks.record import Measurement
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """What a person may choose for a run; every benchmark uses what applies to it.

    Args:
        seed: Seed of everything random.
        quick: Few samples, for a smoke test; such rows say so in their parameters.
        url: Base URL of a running mesh; None: the mesh called ``name``.
        name: Mesh of this machine; when none of that name runs, a benchmark that needs one starts and ends its own.
        config: Deployment file of the mesh; None: the default one.
    """

    seed: int = 0
    quick: bool = False
    url: str | None = None
    name: str = "rankmesh"
    config: Path | None = None


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """What a benchmark function returns.

    Args:
        measurements: The figures, in the order in which a person wants to read them.
        config_hash: Digest of the configuration that was measured.
    """

    measurements: tuple[Measurement, ...]
    config_hash: str


Benchmark: TypeAlias = Callable[[BenchmarkOptions], BenchmarkReport]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a benchmark lives; it is imported only when it runs, so listing costs nothing.

    Args:
        target: ``module:function``.
        summary: One sentence.
        metrics: Fixed metric names; a benchmark may add others.
    """

    target: str
    summary: str
    metrics: tuple[str, ...]


BENCHMARKS: dict[str, Entry] = {
    "mesh": Entry(
        "benchmarks.end_to_end.mesh:run",
        "rank requests over HTTP: idle latency, rate with 4 clients, and what the mesh adds to the compute",
        ("p50_ms_500", "p99_ms_500", "overhead_ms"),
    ),
    "stations": Entry(
        "benchmarks.services.stations:run",
        "compute of every station in one process, without Ray: the floor under the mesh's latency",
        ("preprocess_ms", "embedding_ms", "sequence_ms", "ranking_light_ms", "ranking_full_ms", "foundation_ms"),
    ),
    "lookup": Entry(
        "benchmarks.embedding.lookup:run",
        "one shard's service beside the bare FBGEMM call on the same ids, by row type",
        (
            "time_ratio_to_bare",
            "shard_ratio_to_bare",
            "live_ratio_to_bare",
            "bare_us",
            "shard_us",
            "live_us",
            "service_us",
            "planned_ratio_to_shard",
            "rows_s",
        ),
    ),
    "sharing": Entry(
        "benchmarks.models.sharing:run",
        "a user's part once a request, against copying it to candidates and computing it anew; N from 1 to 4,000",
        (
            "speedup_n500_expanded",
            "speedup_n1000_per_pair",
            "growth_2000_over_100",
            "growth_2000_over_100_cached",
            "peak_memory_ratio",
            "first_layer_flop_share_n1000",
        ),
    ),
    "mfu": Entry(
        "benchmarks.models.mfu:run",
        "useful FLOPs of the ranking pass over the measured ceiling of the same run",
        ("mfu_bf16_n1000", "mfu_fp32_n1000", "mfu_layer_bf16_n1000"),
    ),
    "kernels": Entry(
        "benchmarks.kernels.operators:run",
        "every operator against the plain form that it replaces, and what the kernel search chooses",
        (
            "speedup_broadcast_gemm",
            "speedup_broadcast_attention",
            "speedup_grouped_gemm",
            "speedup_topk_over_sort",
            "block_attention_share_causal_4x64",
        ),
    ),
    "lowp": Entry(
        "benchmarks.models.lowp:run",
        "the precision plan of the newest weights against all-bf16 and float32: time and NE; int8 of a large layer",
        ("time_ratio_plan_over_bf16", "ne_change_relative", "speedup_int8_native_over_bf16"),
    ),
    "userlog": Entry(
        "benchmarks.services.userlog:run",
        "histories in the store: bytes an event, reads by length, and other users beside a hot one; two minutes",
        (
            "bytes_per_event",
            "read_ms_2048",
            "storage_ratio_replicated",
            "bytes_ratio_json",
            "hot_user_p99_ratio",
            "hot_user_p99_ratio_by_round",
            "many_users_p99_ratio_by_round",
        ),
    ),
    "oneseq": Entry(
        "benchmarks.models.oneseq:run",
        "events of several sources as one sequence against one a source: NE and operators; three seeds, 6 minutes",
        ("ne_signals_all_merged", "ne_signals_all_separate", "operators_merged", "operators_separate"),
    ),
    "history": Entry(
        "benchmarks.models.history:run",
        "encoding events anew against extending a kept state; time by length; FLOPs of CompSkip; a minute",
        (
            "append_speedup",
            "request_speedup",
            "cached_request_ratio",
            "length_exponent",
            "full_attention_exponent",
            "compskip_flops_cut",
            "long_history_bytes",
        ),
    ),
    "compskip": Entry(
        "benchmarks.models.compskip:run",
        "NE of clicks and FLOPs with encoder layers that take turns, and without; three seeds, 15 minutes",
        ("ne_change_relative", "click_ne_turns", "click_ne_everything", "encoder_flops_cut"),
    ),
    "length": Entry(
        "benchmarks.models.length:run",
        "NE of clicks by the events that the ranker may read of a user, 0 to 1,000, with a power-law fit; 6 minutes",
        (
            *(f"ne_{length}" for length in (0, 10, 30, 100, 300, 1_000)),
            *(f"ne_{length}_few_tokens" for length in (0, 10, 30, 100, 300, 1_000)),
            "power_law_exponent",
            "power_law_exponent_few_tokens",
        ),
    ),
    "turbo": Entry(
        "benchmarks.models.turbo:run",
        "Wukong Turbo on and off: bias, simplification, delegation; three seeds on real data, about 12 minutes",
        ("click_ne_bias", "click_ne_no_bias", "click_ne_simplified", "collectives_sharded", "collectives_delegated"),
    ),
    "growth": Entry(
        "benchmarks.models.growth:run",
        "activations over 16 layers with and without bias, fresh and trained on a twentieth of the data; 4 minutes",
        ("trained_growth_16_candidate_no_bias", "trained_growth_16_candidate_bias"),
    ),
    "frontier": Entry(
        "benchmarks.models.frontier:run",
        "quality against cost of routed tiers beside each tier alone, three seeds; 15 minutes, later runs seconds",
        ("flops_saved_at_equal_ne", "ne_gain_at_equal_flops", "calibration_error_max"),
    ),
    "open_bandit": Entry(
        "benchmarks.models.open_bandit:run",
        "another policy's click rate from a real log with true propensities, against its own log's; few clicks",
        (
            "ips_bts_all",
            "dr_bts_all",
            "ips_uniform_all",
            "dr_uniform_all",
            "ips_bts_men",
            "dr_bts_men",
            "ips_uniform_men",
            "dr_uniform_men",
            "ips_bts_women",
            "dr_bts_women",
            "ips_uniform_women",
            "dr_uniform_women",
        ),
    ),
    "tables": Entry(
        "benchmarks.embedding.tables:run",
        "AUC of MovieLens-1M by table scheme and bytes: separate, allocated, multiplexed; and by row type; 8 minutes",
        ("auc", "gain_allocated", "gain_multiplexed", "rows_bytes", "rows_error", "rows_auc", "rows_ne"),
    ),
    "loading": Entry(
        "benchmarks.weights.loading:run",
        "1 GB of weights at 20 MB/s a stream: one stream against eight, and four replicas that share; 2 minutes",
        ("speedup_8_streams", "origin_reads_4_replicas", "load_s_1", "load_s_8"),
    ),
    "update": Entry(
        "benchmarks.weights.mesh_update:run",
        "20 requests a second to a mesh with 20 updates of its weights a second, against none",
        ("p99_ratio", "p99_ms_idle", "p99_ms_updates", "lag_s", "answers_wrong", "answers_not_whole"),
    ),
    "update_in_process": Entry(
        "benchmarks.weights.update:run",
        "lookups in a table with 20 updates a second beside them, against none, in one process",
        ("lookup_p99_ratio", "lookup_ms_idle", "lookup_ms_updates", "apply_ms"),
    ),
    "overload": Entry(
        "benchmarks.end_to_end.overload:run",
        "a mesh under 0.5 to 4 times its capacity, at random and in bursts, and after a burst; 2 minutes",
        ("goodput_ratio_4x", "goodput_ratio_4x_bursty", "recovery_s", "reject_p99_ms", "capacity_per_s"),
    ),
    "autoscale": Entry(
        "benchmarks.services.autoscale:run",
        "a day's load in simulated time: the scaling policy, Ray Serve's default, and replicas for the peak; a minute",
        ("replica_hours_ratio_static", "miss_ratio_default_policy"),
    ),
    "batching": Entry(
        "benchmarks.models.batching:run",
        "requests ranked together in one pass against one after the other, 20 to 500 candidates",
        ("time_ratio_n20_r4", "time_ratio_n100_r4", "time_ratio_n500_r4"),
    ),
    "wire": Entry(
        "benchmarks.services.wire:run",
        "bytes and client time of 1,000 candidates with 30 features: columns against JSON",
        ("bytes_ratio_json", "encode_time_ratio_json", "bytes_ratio_json_both_zstd", "encode_time_ratio_json_plain"),
    ),
    "preprocess": Entry(
        "benchmarks.services.preprocess:run",
        "preprocess of such a request on one core, from the bytes to the features",
        ("ms_1000_candidates", "bare_ms_1000_candidates"),
    ),
    "topk": Entry(
        "benchmarks.kernels.topk:run",
        "the 1,000 best of 1e4 to 1e7 values: selection against sorting, one thread",
        ("time_ratio_to_sort_1e6", "time_ratio_to_argsort_1e6", "exponent_numpy", "exponent_native"),
    ),
    "freshness": Entry(
        "benchmarks.weights.freshness:run",
        "NE of clicks when serving takes what was learned every minute, hour, day or never; 3 minutes",
        ("ne_minute", "ne_hour", "ne_day", "ne_never"),
    ),
}


def load(name: str) -> Benchmark:
    """Import the function of a benchmark.

    Raises:
        ConfigError: no benchmark has this name; the message lists those there are, and says which is meant.
    """
    if name not in BENCHMARKS:
        like = " or ".join(get_close_matches(name, BENCHMARKS))
        meant = f"; did you mean {like}?" if like else ""
        raise ConfigError(
            f"no benchmark is called {name}; there are {', '.join(BENCHMARKS)}{meant}", field="benchmark", value=name
        )
    module, _, function = BENCHMARKS[name].target.partition(":")
    return cast(Benchmark, getattr(import_module(module), function))
