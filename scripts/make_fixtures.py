"""Makes everything under tests/fixtures: python scripts/make_fixtures.py [name ...].

A name is a folder there (llama, gpt2_ort, ...), a sweep (sweep/llama) or long rows (long/llama). Without names all are
made, in about half an hour on one core. The same versions give the same files; they are

    torch 2.13.0, transformers 4.57.6, tokenizers 0.22.2, optimum-onnx 0.1.0, onnx 1.23.2, onnxruntime 1.32.0,
    onnxruntime-genai 0.11.4 (pip install --no-deps, for its model builder), onnx-ir 1.1.0, onnxscript 0.7.2
"""

import argparse
import logging
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures"


def check_versions() -> None:
    """Exits with the list of packages whose version is not the one in this file's first lines."""
    wrong = []
    for package, wanted in re.findall(r"([a-z][\w-]*) (\d+\.\d+\.\d+)", __doc__ or ""):
        try:
            found = version(package).split("+")[0]
        except PackageNotFoundError:
            found = "none"
        if found != wanted:
            wrong.append(f"{package} {wanted} (found {found})")
    if wrong:
        sys.exit(f"make_fixtures: the goldens were made with other versions; install {', '.join(wrong)}")


def main() -> None:
    check_versions()
    os.environ["OMP_NUM_THREADS"] = "1"  # sums in one order
    import torch
    from fixtures import architectures, carried, exports, long_rows, longrope, sweep, variants

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    makers = dict.fromkeys(architectures.CONFIGS, exports.make) | variants.VARIANTS | carried.CARRIED
    makers |= longrope.LONGROPE
    makers |= {f"sweep/{name}": sweep.make for name in architectures.CONFIGS if name not in architectures.NO_SWEEP}
    makers |= {f"long/{name}": long_rows.make for name in long_rows.NAMES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(makers))
    for name in parser.parse_args().names or makers:
        if name not in makers:
            parser.error(f"{name} is not one of {', '.join(makers)}")
        print(f"{name}: {makers[name](OUT / name)}", flush=True)


if __name__ == "__main__":
    main()
