"""What the runs of a sweep cost one example together, for each data set."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from noisegate.runs.costs import Bill, bills, data_of, training_of
from noisegate.sweeps.folder import SweepCell


def bills_of(cells: Sequence[SweepCell]) -> list[Bill]:
    """The bills of a sweep. A run that failed may have spent budget too, which cannot be priced: it is counted."""
    failed = Counter(data_of(cell.spec) for cell in cells if cell.status == "failed")
    found = bills(training_of({**cell.result, "spec": cell.spec.canonical()}) for cell in cells if cell.result)
    known = {bill.data for bill in found}
    found += [Bill(data, 0, None, 0.0, "none has a result") for data in failed if data not in known]
    return [replace(bill, broken=failed[bill.data]) for bill in found]
