"""A few hundred of the fuzzer's cases of every kind; `make fuzz` runs on for hours."""

from __future__ import annotations

import fuzz
import pytest

# Graphs and decoders whose nodes are recorded, the smallest that have attention, quantized weights and a prompt cache.
DECODERS = ["toy", "llama_q4", "qwen3_genai_int4"]
BATCH = [
    fuzz.Cases("operator", 0, 600),
    fuzz.Cases("settings", 0, 120),
    fuzz.Cases("template", 0, 60),
    fuzz.Cases("tokenizer", 0, 60),
    fuzz.Cases("prompt_cache", 0, 40),
    fuzz.Cases("program", 0, 40),
    fuzz.Cases("graph", 0, 40),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    fuzz.prepare(folder, DECODERS, [])
    return folder


@pytest.mark.slow
def test_no_case_crashes_hangs_or_raises_what_is_none_of_our_errors(shared):
    results = list(fuzz.run_cases(BATCH, shared, fuzz.PERTURBING_BYTES[0]))
    assert [result for result in results if "bug" in result] == []
    assert len(results) == sum(cases.stop - cases.start for cases in BATCH)
    for cases in BATCH:  # broken files are refused, and some changes break nothing
        outcomes = [result["outcome"] for result in results if result["kind"] == cases.kind]
        assert 0 < outcomes.count("ran") < len(outcomes), cases.kind


def test_a_case_that_ends_or_stops_its_worker_is_found(shared, monkeypatch):
    monkeypatch.setenv("FUZZ_DEFECTS", "3 exit, 5 sleep, 7 KeyError, 9 file")
    results = list(fuzz.run_cases([fuzz.Cases("defect", 0, 12)], shared, 0, seconds=1))
    assert [result["number"] for result in results] == list(range(12))
    bugs = {result["number"]: result["bug"].split(":")[0] for result in results if "bug" in result}
    assert bugs == {3: "exit 3", 5: "no result in time", 7: "KeyError", 9: "files outside the folder"}


def test_results_that_depend_on_what_memory_held_are_found(shared, tmp_path, monkeypatch):
    monkeypatch.setenv("FUZZ_DEFECTS", "4 memory")
    report = fuzz.Report(tmp_path)
    fuzz.run_twice([fuzz.Cases("defect", 0, 6)], shared, report)
    assert report.counts == {"defect": {"ran": 6, "differs": 1}}
