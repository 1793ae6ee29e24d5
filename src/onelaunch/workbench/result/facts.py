"""Facts about a run in its result: device, software and sources, the device's measured peaks, and the time and money spent.

``schema.py`` makes them parts of a :class:`~onelaunch.workbench.result.schema.Result`.
"""

from __future__ import annotations

from pydantic import Field

from onelaunch.workbench.stored import Amount, Count, Grown, Name, Positive, Slug, Stored, Words


class VariantSource(Stored):
    """Source of the code of one variant."""

    source: Words
    """SHA-256 of the files that the variant runs, see :mod:`onelaunch.operation.sources`; empty if there is no file."""
    distribution: Words = ""
    """Name and version of the distribution that provides the variant, such as ``onelaunch 0.3.0``; empty if it has none."""


class EarlierCommit(Stored):
    """Measurements of a result that an earlier run made at another commit of onelaunch, with everything else alike."""

    commit: Words
    date: Words
    """End of the earlier run in ISO 8601, UTC."""
    measured: tuple[Words, ...]
    """Names of the measurements that were taken over: shapes, with the direction where it is not the forward one; in a study of
    models, what its tasks do."""


class Provenance(Grown, Stored):
    """Provenance of a result: device, time, software and command."""

    LATER = ("variants", "package", "timing_seed", "earlier")

    device: Words
    slug: Slug
    """The device's name as it stands in names of files, such as ``nvidia-h200``."""
    architecture: Words
    driver: Words
    versions: dict[Words, Words]
    """Versions by name: python, torch, triton, cuda or rocm, onelaunch, and packages that the variants need or come from."""
    commit: Words
    """Commit of the checkout that ran, with ``-dirty`` if it had changes; empty if it is not known."""
    date: Words
    """End of the run in ISO 8601, UTC."""
    clocks: dict[Words, Amount] = Field(default_factory=dict)
    """Medians of the SM and memory clock in MHz and of the power in watts, with the unit in the key (``sm_mhz``), and the lowest
    SM clock; empty without a driver that reports them."""
    command: Words = ""
    scale: Words = ""
    """Scale of the shapes that ran, ``small`` or ``full``."""
    rounds: Count = 0
    """Number of rounds that were asked for."""
    variants: dict[Name, VariantSource] = Field(default_factory=dict)
    """Sources of the study's variants by name, in a study of several operations as ``gla.fla``. Empty in results of older
    versions."""
    package: Words = ""
    """SHA-256 of the sources of onelaunch where ``commit`` does not determine them: it is empty or ends in ``-dirty``."""
    timing_seed: Count | None = None
    """Seed of the inputs that were timed, drawn for the run; ``None`` in results from before it was drawn."""
    earlier: tuple[EarlierCommit, ...] = ()
    """Measurements that were made at other commits than ``commit``, and taken over."""

    @property
    def commits(self) -> str:
        """Commit of the run, and those of the measurements that it took over, as a phrase; empty if the commit is not known."""
        older = [f"{each.commit} for {len(each.measured)} earlier measurements" for each in self.earlier]
        return "; ".join([self.commit, *older])


class StoredCeilings(Grown, Stored):
    """Measured peaks of the device. :class:`onelaunch.device.hardware.Ceilings` explains its fields, which are the same."""

    LATER = ("read_bytes_per_second", "spread")

    copy_bytes_per_second: Positive
    matrix_flops_per_second: dict[Words, Positive]
    launch_seconds: Positive
    measured_at: Words
    software: Words
    read_bytes_per_second: Positive | None = None
    spread: dict[Words, Amount] | None = None


class Spent(Stored):
    """Time and money that a run took, from its start to its decision. A resumed run adds those of the runs that it continues."""

    wall_seconds: Amount
    """Seconds from the start of the run to its end. Time between an interruption and the resumption is not in it."""
    device_seconds: Amount
    """Seconds in which a variant or control ran: while it was probed, verified, prepared (its compilation included), timed or
    counted. The rest of the wall time went into processes that only compile, oracles, inputs and peaks."""
    price_per_hour: Amount | None = None
    """Price of an hour of the machine, in any currency, as given for the run; ``None`` if it was not."""
    cost: Amount | None = None
    """Price of the wall time, in the currency of ``price_per_hour``; ``None`` without a price."""
