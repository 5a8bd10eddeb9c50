"""The pages that scripts write are those that they would write now, and the links of the pages lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from conftest import NAMES

from mlx_transmuter.runtime.decoder import Decoder

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_table_of_settings_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import list_settings

    assert list_settings.TARGET.read_text(encoding="utf-8") == list_settings.settings_page()
    sys.modules.pop("list_settings")


@pytest.mark.slow
def test_the_table_of_rewrites_is_up_to_date(converted):
    """But for the errors, which differ a little between machines."""
    from scripts import report_rewrites

    page = report_rewrites.TARGET.read_text(encoding="utf-8")
    assert page.startswith(report_rewrites.HEAD)
    header, _, *lines = page.removeprefix(report_rewrites.HEAD).splitlines()
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    written = [dict(zip(columns, (cell.strip() for cell in line[1:-1].split("|")), strict=True)) for line in lines]
    names = sorted(path.parent.name for path in report_rewrites.FIXTURES.glob("*/model.onnx"))
    rows = [report_rewrites.table_row(name, converted(name)) for name in names]
    assert list(rows[-1]) == columns
    for row in (*written, *rows):
        for column in report_rewrites.ERROR_COLUMNS:
            del row[column]
    assert written == rows, "run scripts/report_rewrites.py"


@pytest.mark.slow
def test_the_table_of_quantized_caches_has_a_line_for_each_model_with_keys_and_values(loaded):
    """What the lines say is measured; their models and sizes of heads are not."""
    page = (ROOT / "docs" / "caches.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    pairs = {name: Decoder(loaded(name).decoder, 1).signature.cache_pairs for name in NAMES}
    expected = [[name, str(pairs[name][0].head_dim)] for name in NAMES if pairs[name]]
    assert [line[:2] for line in lines if line[0] not in ("model", "demo")] == expected, (
        "run scripts/measure_kv_bits.py"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_two_commands_of_the_readme_are_two_lines_that_make_knows():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Two commands", 1)[1].split("## ", 1)[0]
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    targets = [line.removeprefix("make ") for line in block.strip().split("\n")]
    assert len(targets) == 2
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
