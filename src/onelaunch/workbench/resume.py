"""Facts that must be equal for an interrupted run to be resumed.

``running.py`` calls :func:`differences` before it takes over the measurements of an interrupted run.
"""

from __future__ import annotations

from onelaunch.workbench.result import Result


def differences(earlier: Result, now: Result) -> list[str]:
    """Return a clause for each fact that influences measurements and differs between two results."""
    then, here = earlier.provenance, now.provenance
    facts = {"study": (earlier.study_digest[:12], now.study_digest[:12])}
    facts |= {name: (getattr(then, name), getattr(here, name)) for name in ("device", "driver", "commit", "scale", "rounds")}
    # The digest of the files is stored only where the commit does not determine them: it is empty, or ends in "-dirty".
    facts |= {"files of onelaunch": (then.package[:12], here.package[:12])} if then.package and then.commit == here.commit else {}
    facts |= {package: (then.versions.get(package), here.versions.get(package)) for package in {**then.versions, **here.versions}}
    for name in then.variants.keys() & here.variants.keys():
        one, other = then.variants[name], here.variants[name]
        facts[f"source of the variant {name}"] = one.source[:12], other.source[:12]
        facts[f"distribution of the variant {name}"] = one.distribution, other.distribution
    found = [
        f"{what} {before or 'none'} then, {after or 'none'} now" for what, (before, after) in facts.items() if before != after
    ]
    # A commit with changes does not say which changes. Results of older versions hold no digests that would.
    if then.commit == here.commit and then.commit.endswith("-dirty") and not (then.package and then.variants):
        found.append(f"commit {then.commit} both times, with changes that may differ, because the earlier run stored no digests")
    return found
