"""``python -m cluster.simulation --seed N --count N``: simulates worlds, and makes one that breaks a rule smaller."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import fields

from cluster.simulation.checks import check
from cluster.simulation.mesh import simulate
from cluster.simulation.world import World, draw_world
from shared.clock import SystemClock

CHUNK = 25
SHRINK_RUNS_MAX = 300
SHOWN_MAX = 3


def broken_rules(seed: int) -> list[str]:
    """Simulate the world of a seed and return the rules that it broke."""
    return check(simulate(draw_world(seed)))


def shrink(world: World) -> World:
    """Return a world that still breaks a rule and has nothing in it that need not be there, as far as was tried."""
    num_runs, found = 0, True
    while found:
        found = False
        for smaller in world.smaller():
            if num_runs >= SHRINK_RUNS_MAX:
                return world
            num_runs += 1
            if check(simulate(smaller)):
                world, found = smaller, True
                break
    return world


def describe(world: World) -> Iterator[str]:
    """Yield the lines that say what happens in a world."""
    for field in fields(world):
        value = getattr(world, field.name)
        if isinstance(value, tuple):
            yield from (f"    {item}" for item in value)
        else:
            yield f"    {field.name}={value!r}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 1 when a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m cluster.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1_000, help="how many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args(arguments)
    seeds = range(given.seed, given.seed + given.count)
    clock = SystemClock()
    start_s = clock.monotonic_s()
    with multiprocessing.get_context("fork").Pool(max(1, min(given.jobs, given.count)), _collect_less) as pool:
        results = zip(seeds, pool.imap(broken_rules, seeds, CHUNK), strict=True)
        broken = {seed: rules for seed, rules in results if rules}
    took_s = clock.monotonic_s() - start_s
    _say(f"{given.count} worlds from seed {given.seed}, {len(broken)} broke a rule, {took_s:.1f} s")
    for seed, rules in list(broken.items())[:SHOWN_MAX]:
        _say(f"\nseed {seed}:", *(f"  {rule}" for rule in rules[:10]))
        _say("  again: make sim " + f"SEED={seed} N=1", "  made smaller:", *describe(shrink(draw_world(seed))))
    if len(broken) > SHOWN_MAX:
        _say(f"\nand seeds {', '.join(map(str, list(broken)[SHOWN_MAX:]))}")
    return 1 if broken else 0


def _collect_less() -> None:
    gc.set_threshold(50_000, 20, 100)  # a world's garbage dies with its loop; looking for it in between costs a fifth


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
