"""What docs and README say of `fortified` beside the paper is what the runs in the repository say."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_table_of_the_page_is_that_of_the_runs():
    """And the README's sentence has its counts."""
    script = ROOT / "benchmarks" / "beside_paper.py"
    table = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.strip()
    assert table.count("\n| fashion |") > 10
    assert table in (ROOT / "docs" / "results.md").read_text(encoding="utf-8"), f"paste what {script.name} prints"
    counted = re.search(r"Ahead in (\d+ of \d+ cells), by (\S+) points at most; at worst -(\S+)\.$", table)
    assert counted
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    share, most, least = counted.groups()
    assert f"in {share}" in readme
    assert f"by up to {most} points" in readme
    assert f"up to {least} behind" in readme
