"""Measure a device's peaks several times, and print the rate and the spread of every method.

    python tools/measure_peaks.py --device cuda:0 --repeats 3

``onelaunch doctor --refresh`` measures the same and stores only the fastest method of each quantity. This script also shows the
other methods, and how much the peaks differ from repeat to repeat. It stores no peaks, and is run by hand alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from onelaunch.device import hardware, peaks
from onelaunch.device.peaks import Probe


def main() -> None:
    """Print one line for each method, with its rates in all repeats, then one for each quantity; or print all methods as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto", help="cuda:0, cpu, ...; auto is the first GPU, or the CPU without one")
    parser.add_argument("--repeats", type=int, default=3, help="number of times that everything is measured")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a listing")
    arguments = parser.parse_args()
    device = str(hardware.resolve(arguments.device))
    start = time.perf_counter()
    surveys = [peaks.survey(device) for _ in range(arguments.repeats)]
    seconds = (time.perf_counter() - start) / len(surveys)
    best = [peaks.fastest(survey) for survey in surveys]
    if arguments.json:
        table = [[facts(probe) for probe in survey] for survey in surveys]
        text = json.dumps({"device": hardware.describe(device).name, "seconds": seconds, "repeats": table}, indent=1)
    else:
        text = "\n".join([f"{hardware.describe(device).name}, {seconds:.1f} s a repeat", *lines(surveys, best)])
    sys.stdout.write(text + "\n")


def facts(probe: Probe) -> dict[str, object]:
    """Return the results of a probe as values for JSON."""
    return {
        "quantity": probe.quantity,
        "method": probe.method,
        "per_second": probe.peak,
        "spread": probe.spread,
        "calls": probe.calls,
        "samples": len(probe.rates),
    }


def lines(surveys: list[list[Probe]], best: list[dict[str, Probe]]) -> list[str]:
    """Return the lines of the listing: each method's largest spread and rates, then the peaks and their range over the repeats.

    Args:
        surveys: Probes of all methods, one list for each repeat.
        best: Probe of the fastest method by quantity, for each repeat.
    """
    found = ["", f"{'quantity':<14} {'method':<36} spread  per second, by repeat"]
    for same in zip(*surveys, strict=True):
        rates = "  ".join(f"{probe.peak:.5g}" for probe in same)
        found.append(f"{same[0].quantity:<14} {same[0].method:<36} {max(each.spread for each in same):6.2%}  {rates}")
    found += ["", f"{'peak':<14} {'method':<36} range   highest"]
    for quantity in best[0]:
        rates = [each[quantity].peak for each in best]
        top = max((each[quantity] for each in best), key=lambda probe: probe.peak)
        found.append(f"{quantity:<14} {top.method:<36} {max(rates) / min(rates) - 1:6.2%}  {top.peak:.5g}")
    return found


if __name__ == "__main__":
    main()
