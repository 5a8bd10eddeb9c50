"""A contender in a process of its own: it takes one request a line on stdin and answers one line on stdout."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # a checkout that isn't installed
from contenders import CONTENDERS
from timing import Generation, searched


def main() -> None:
    name, root = sys.argv[1], Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not stand between the answers
    start = time.perf_counter()
    contender = CONTENDERS[name](root)
    print(json.dumps({"load": time.perf_counter() - start}), file=answers, flush=True)
    generation = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "beams" in request and request["beams"] > 1:
                answer = searched(contender, request["prompts"], request["new"], request["beams"])
            elif "prompts" in request:
                generation = Generation(contender, request["prompts"], request["new"])
                answer = generation.first()
            elif "more" in request:
                answer = generation.more(request["more"])
            else:
                answer = generation.end() if generation is not None else {"tokens": []}
                generation = None
        except NotImplementedError as reason:
            answer = {"none": str(reason)}
        unit = 1 if sys.platform == "darwin" else 1024
        answer["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        answer["shapes"] = contender.shapes()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
