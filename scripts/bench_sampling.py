"""Times the processors of sampling on random scores, in interleaved rounds, and prints each relative to a sort of them.

    python scripts/bench_sampling.py
    python scripts/bench_sampling.py --rows 1 --vocab 150000 --spread 6    # few likely tokens

What is timed is the processor time of this process, which other processes hardly change; on a GPU, the time
that passes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from mlx_transmuter.generation.logits.probability_cutoffs import epsilon_cutoff, eta_cutoff, min_p
from mlx_transmuter.generation.logits.top_k_top_p import top_k, top_k_top_p, top_p
from mlx_transmuter.generation.logits.typical_sampling import typical_p

PROCESSORS: dict[str, Callable[[mx.array], mx.array]] = {
    "a sort": lambda scores: mx.argsort(scores, axis=-1),
    "the best token": lambda scores: mx.argmax(scores, axis=-1),
    "top_k 50": lambda scores: top_k(scores, 50),
    "top_k 50, top_p 0.9": lambda scores: top_k_top_p(scores, 50, 0.9),
    "top_p 0.9": lambda scores: top_p(scores, 0.9),
    "typical_p 0.9": lambda scores: typical_p(scores, 0.9),
    "min_p 0.05": lambda scores: min_p(scores, 0.05),
    "epsilon_cutoff 0.001": lambda scores: epsilon_cutoff(scores, 0.001),
    "eta_cutoff 0.001": lambda scores: eta_cutoff(scores, 0.001),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--spread", type=float, default=3.0, help="the standard deviation of the scores")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    clock = time.process_time if mx.default_device() == mx.cpu else time.perf_counter
    draw = np.random.default_rng(0)
    scores = mx.array((draw.standard_normal((args.rows, args.vocab)) * args.spread).astype(np.float32))
    compiled = {name: mx.compile(process) for name, process in PROCESSORS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for round_number in range(args.rounds + 1):
        for name, process in compiled.items():
            started = clock()
            mx.eval(process(scores))
            if round_number:  # the first compiles
                seconds[name].append(clock() - started)
    unit = median(seconds["a sort"])
    print(f"{args.rows} rows of {args.vocab} scores; a sort takes {unit * 1e3:.1f} ms")
    for name, times in seconds.items():
        print(f"{name:24s} {median(times) / unit:6.2f}")


if __name__ == "__main__":
    main()
