"""Times speculative decoding against plain decoding of the same text, in interleaved rounds, and prints the ratio.

    python scripts/bench_drafts.py            # the demo model tells a story, and one that its prompt already has
    python scripts/bench_drafts.py --model FOLDER --prompt-file text.txt --draft-model SMALLER

A case is timed from the first new token to the last, once per round, after a warm-up round. The tokens must be the
same; with float16 weights rounding may make them differ where two tokens tie, which the last column says.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
import mlx_transmuter as mt

DEMO = Path(__file__).parent.parent / "mlx_transmuter" / "demo"
STORY_REQUEST = {"role": "user", "content": "Tell me a story about a fox."}


class Timing(NamedTuple):
    """Seconds per new token after the first, the tokens, and the counts of the drafts."""

    seconds: float
    tokens: list[int | None]
    draft_counts: Any


def repeated_conversation(model: mt.Model) -> list[dict[str, str]]:
    """Returns a conversation with the same request again, so that the answer repeats the text before it."""
    story = mt.text.generation(model, do_sample=False)([STORY_REQUEST]).text
    return [STORY_REQUEST, {"role": "assistant", "content": story}] * 2 + [STORY_REQUEST]


def time_task(task: Any, prompt: Any) -> Timing:
    *_, last = pieces = list(task.stream(prompt, seed=0))
    return Timing(1 / last.generation_tps, [piece.token for piece in pieces], last.draft_counts)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--prompt-file", type=Path, help="a text to continue, in place of the stories")
    parser.add_argument("--draft-model", help="a smaller model, timed beside prompt lookup")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7, 15], help="most draft tokens per pass")
    parser.add_argument("--new", type=int, default=128, help="new tokens per run")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def draft_cases(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the settings of each case by its name."""
    cases: dict[str, dict[str, Any]] = {"plain": {}}
    cases |= {f"prompt lookup, {n}": {"prompt_lookup_num_tokens": n} for n in args.drafts}
    if args.draft_model:
        draft = mt.load(args.draft_model)
        cases |= {f"draft model, {n}": {"assistant_model": draft, "num_assistant_tokens": n} for n in args.drafts}
    return cases


def print_rows(text: str, timings: dict[str, list[Timing]]) -> None:
    """Prints a line for each case; the first round of each is the warm-up."""
    seconds = {name: median(timing.seconds for timing in runs[1:]) for name, runs in timings.items()}
    for name, runs in timings.items():
        counts = runs[-1].draft_counts
        drafts = f"{counts.tokens_per_pass:.2f} | {counts.accepted} of {counts.proposed}" if counts else "1 | —"
        same = "yes" if runs[-1].tokens == timings["plain"][-1].tokens else "no"
        ratio = seconds["plain"] / seconds[name]
        print(f"| {text} | {name} | {1 / seconds[name]:.1f} | {ratio:.2f} | {drafts} | {same} |", flush=True)


def main() -> None:
    args = parse_arguments()
    model = mt.load(args.model)
    prompts: dict[str, Any] = {"a story": [STORY_REQUEST], "the same again": repeated_conversation(model)}
    if args.prompt_file:
        prompts = {args.prompt_file.name: args.prompt_file.read_text(encoding="utf-8")}
    sampling = {"do_sample": True, "temperature": args.temp} if args.temp else {"do_sample": False}
    tasks = {
        name: mt.text.generation(model, max_new_tokens=args.new, **sampling, **case)
        for name, case in draft_cases(args).items()
    }
    print("| text | case | tokens/s | of plain | tokens per pass | drafts accepted | same tokens |\n|" + "---|" * 7)
    for text, prompt in prompts.items():
        timings: dict[str, list[Timing]] = {name: [] for name in tasks}
        for _ in range(args.rounds + 1):
            for name, task in tasks.items():
                timings[name].append(time_task(task, prompt))
        print_rows(text, timings)


if __name__ == "__main__":
    main()
