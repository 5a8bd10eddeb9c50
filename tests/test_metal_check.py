"""The page that `make metal-check` prints, made on the CPU."""

import sys

import pytest

from scripts import metal_check

ROOT = metal_check.ROOT


def test_the_page_has_a_row_for_each_set_of_tests_and_each_case(monkeypatch):
    monkeypatch.setattr(metal_check, "CASES", [(5, 1), (5, 2)])
    monkeypatch.setattr(metal_check, "NEW_TOKENS", 4)
    results = metal_check.benchmark(None)
    assert [(row["prompt"], row["rows"]) for row in results] == metal_check.CASES
    assert all(float(row["decoded tokens/s"]) > 0 for row in results)
    page = metal_check.render_page({"a set": (True, "3 passed"), "another": (False, "1 failed")}, {"demo": results})
    assert "| a set | yes | 3 passed |" in page
    assert "| another | **no** | 1 failed |" in page
    assert page.count("| 5 | ") == 2


def test_its_tests_are_there():
    for arguments in metal_check.TESTS.values():
        assert all((ROOT / name).is_file() for name in arguments if name.endswith(".py"))
    assert "def test_a_step_copies_no_pool" in (ROOT / "tests" / "test_steps.py").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has such a GPU")
def test_without_a_gpu_of_a_mac_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["metal_check.py"])
    assert metal_check.main() == 2
    assert "--device cpu" in capsys.readouterr().err
