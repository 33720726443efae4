"""One target under libFuzzer, which reads all other arguments and ends the process: see `fuzz`.

python -m benchmarks.fuzz_atheris NAME [options of libFuzzer] [FOLDER of inputs]
"""

from __future__ import annotations

import random
import sys
import warnings

import atheris

with atheris.instrument_imports(include=["specproxy"]):
    from benchmarks import fuzz_files  # noqa: F401 - adds targets
    from benchmarks.fuzz_inputs import reshaped
    from benchmarks.fuzz_targets import SEEDS, TARGETS


def main() -> None:
    """Fuzz until the time is over or an input fails; well-formed inputs are run first."""
    name = sys.argv[1]
    target, seeds = TARGETS[name], SEEDS[name]
    warnings.simplefilter("ignore")

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        """libFuzzer's own changes, or a JSON text of another shape, or one to begin with."""
        rng = random.Random(seed)
        if rng.random() < 0.01:
            data = rng.choice(seeds)
        if rng.random() < 0.3:
            return reshaped(data, rng)[:most]
        return bytes(atheris.Mutate(data[:most], most))

    for data in seeds:
        target(data)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
