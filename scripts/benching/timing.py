"""The times of a contender's generation: to the first token, and then from token to token, a few of them at a time."""

from __future__ import annotations

import time
from typing import Any

from contenders import Prompts


class Generation:
    """One generation of a contender over prompts."""

    def __init__(self, contender: Any, prompts: Prompts, new: int):
        self.contender = contender
        self.left = contender.tokens(prompts, new, 1)
        self.found: list[int] = []

    def first(self) -> dict:
        """first: seconds to the first token."""
        start = time.perf_counter()
        tokens = next(self.left)
        if not tokens:  # what a contender prepares before its first step isn't timed
            start = time.perf_counter()
            tokens = next(self.left)
        seconds = time.perf_counter() - start
        self.found.append(tokens[0])
        return {"first": seconds}

    def more(self, count: int) -> dict:
        """steps: seconds from token to token, `count` times. hosts: those of each step outside of its evaluation, []
        where the contender doesn't say."""
        steps, hosts = [], []
        for _ in range(count):
            evaluated, start = getattr(self.contender, "evaluated", None), time.perf_counter()
            tokens = next(self.left)
            steps.append(time.perf_counter() - start)
            if evaluated is not None:
                hosts.append(steps[-1] - (self.contender.evaluated - evaluated))
            self.found.append(tokens[0])
        return {"steps": steps, "hosts": hosts}

    def end(self) -> dict:
        """tokens: of the first prompt."""
        self.left.close()
        return {"tokens": self.found}


def searched(contender: Any, prompts: Prompts, new: int, beams: int) -> dict:
    """The same of a beam search, which gives its tokens when it is done: a step is what each of the tokens beyond the
    second takes more."""
    seconds = []
    for count in (2, new):
        start = time.perf_counter()
        for _ in contender.tokens(prompts, count, beams):
            pass
        seconds.append(time.perf_counter() - start)
    short, whole = seconds
    return {"first": short, "steps": [(whole - short) / (new - 2)], "hosts": []}
