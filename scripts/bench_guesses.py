"""Times speculative decoding against plain decoding of the same text, in interleaved rounds, and prints the ratio.

    python scripts/bench_guesses.py            # the demo model tells a story, and one that its prompt holds
    python scripts/bench_guesses.py --model FOLDER --prompt-file text.txt --draft-model SMALLER

A case is timed from the first new token to the last, once per round, after a round that doesn't count. The texts must
be the same token for token; with float16 weights rounding may end that where two tokens tie, and is then said.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import mlx_transmuter as mt

DEMO = Path(__file__).parent.parent / "mlx_transmuter" / "demo"
ASK = {"role": "user", "content": "Tell me a story about a fox."}


def told_twice(model: mt.Model) -> list[dict[str, str]]:
    """A conversation in which the same is asked again, so that the answer repeats the text before it."""
    story = mt.text.generation(model, do_sample=False)([ASK]).text
    return [ASK, {"role": "assistant", "content": story}] * 2 + [ASK]


def timed(task: Any, prompt: Any) -> tuple[float, list[int | None], Any]:
    """Seconds per new token after the first, the tokens, and what the guesses brought."""
    *_, last = pieces = list(task.stream(prompt, seed=0))
    return 1 / last.generation_tps, [piece.token for piece in pieces], last.draft_counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--prompt-file", type=Path, help="a text to continue, in place of the stories")
    parser.add_argument("--draft-model", help="a smaller model, tried beside prompt lookup")
    parser.add_argument("--guesses", type=int, nargs="+", default=[3, 7, 15], help="most guesses in a pass")
    parser.add_argument("--new", type=int, default=128, help="new tokens a run")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = mt.load(args.model)
    prompts: dict[str, Any] = {"a story": [ASK], "the same again": told_twice(model)}
    if args.prompt_file:
        prompts = {args.prompt_file.name: args.prompt_file.read_text(encoding="utf-8")}
    sampling = {"do_sample": True, "temperature": args.temp} if args.temp else {"do_sample": False}
    cases: dict[str, dict] = {"plain": {}}
    cases |= {f"prompt lookup, {n}": {"prompt_lookup_num_tokens": n} for n in args.guesses}
    if args.draft_model:
        draft = mt.load(args.draft_model)
        cases |= {f"draft model, {n}": {"assistant_model": draft, "num_assistant_tokens": n} for n in args.guesses}
    tasks = {
        name: mt.text.generation(model, max_new_tokens=args.new, **sampling, **case) for name, case in cases.items()
    }
    print("| text | case | tokens/s | of plain | tokens per pass | guesses kept | same tokens |\n|" + "---|" * 7)
    for text, prompt in prompts.items():
        found: dict[str, list[tuple]] = {name: [] for name in tasks}
        for _ in range(args.rounds + 1):
            for name, task in tasks.items():
                found[name].append(timed(task, prompt))
        seconds = {name: median(one[0] for one in runs[1:]) for name, runs in found.items()}
        for name, runs in found.items():
            _, tokens, guesses = runs[-1]
            each = f"{guesses.tokens_per_pass:.2f} | {guesses.kept} of {guesses.proposed}" if guesses else "1 | —"
            same = "yes" if tokens == found["plain"][-1][1] else "no"
            ratio = seconds["plain"] / seconds[name]
            print(f"| {text} | {name} | {1 / seconds[name]:.1f} | {ratio:.2f} | {each} | {same} |", flush=True)


if __name__ == "__main__":
    main()
