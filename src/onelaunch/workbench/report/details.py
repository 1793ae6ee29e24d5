"""Sections of a report after its first screen: all times, errors and bytes with their sources, and the provenance.

The reports on the terminal, in Markdown and in HTML format what :func:`details` returns. ``documents.py`` takes the last section,
the provenance, and :func:`times_table`.

``floor_microseconds`` of a plan is the roofline bound. Bytes have the source ``ncu`` if the hardware counted them, and
``analytic`` if they are computed.
"""

from __future__ import annotations

from collections.abc import Iterable

from onelaunch.operation import Direction
from onelaunch.wording import listing
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.measured import counted_measures
from onelaunch.workbench.report.predictions import predictions
from onelaunch.workbench.report.summary import (
    REGIMES,
    Section,
    called,
    cells_at,
    direction_words,
    directions,
    main_regime,
    over_roofline,
    reference,
    regimes,
    shapes,
    sizes,
    speedup,
    valid_timing,
)
from onelaunch.workbench.report.tables import Table, columns, words
from onelaunch.workbench.result import Cell, ComponentError, EarlierCommit, Estimate, Result
from onelaunch.workbench.study import Shape, case_name

MANY = 3
"""Largest number of tables, or of notes of the run, that a section of a page shows unfolded."""

_CLOCKS = {
    "sm_mhz": "SM clock, MHz, median",
    "sm_mhz_lowest": "SM clock, MHz, lowest",
    "memory_mhz": "memory clock, MHz, median",
    "power_w": "power, W, median",
    "temperature_c": "temperature, °C, median",
}
"""Titles, with units, of the sampled values in a result's provenance. A value without a title is shown under its own name.

Runs do not sample ``temperature_c`` any more.
"""

READING = (
    "Cold: inputs rotated through more than three last-level caches; on a GPU the calls are replayed from a CUDA graph. "
    "Warm: the same inputs again. Eager: calls of the public function from Python, including checks and dispatch. Times are "
    "medians over rounds with their 95 % bootstrap interval; speeds are medians of ratios taken round by round."
)
"""Explanation of the columns of times."""

_IN_A_ROW = (
    "Running: one of many consecutive steps on the device, each on the state that the previous one left. "
    "Served: the same through the public loop, by the host's clock."
)
"""Explanation of the regimes of consecutive steps."""

_HISTORY = "History, as the original write-up reported it. Nothing here was measured by this run or used in its decision."
"""Introduction of the notes of a study."""


def details(result: Result) -> tuple[Section, ...]:
    """Return the sections after the first screen, without empty ones."""
    sections = (
        predictions(result),
        _shapes(result),
        *(_times(result, direction) for direction in directions(result)),
        _savings(result),
        *(_traffic(result, direction) for direction in directions(result)),
        _beside(result),
        _correctness(result),
        _noise(result),
        Section("Notes of the run", result.notes, folded=len(result.notes) > MANY),
        _history(result),
        _provenance(result),
    )
    return tuple(section for section in sections if section.tables or section.text)


def times_table(result: Result, shape: Shape, direction: Direction) -> Table:
    """Return the table of all variants and controls at one shape in one direction."""
    cells = cells_at(result, shape.name, direction)
    over = next((cell for cell in cells if cell.variant == reference(result)), None)
    regime = main_regime(result)  # the regime of the columns "speed" and "/ bound"
    rows = []
    for cell in cells:
        gain, distance = speedup(cell, over, regime), over_roofline(cell, regime)
        measured = [timing.microseconds for name in regimes(result) if (timing := valid_timing(cell, name))]
        rows.append(
            (
                called(cell),
                words(cell.status),
                *(
                    q.interval(timing.microseconds) if (timing := valid_timing(cell, name)) else q.NONE
                    for name in regimes(result)
                ),
                _speed(gain, is_reference=cell is over and bool(measured)),
                q.ratio(distance) if distance else q.NONE,
                q.span([estimate.samples for estimate in measured]) if measured else q.NONE,
            )
        )
    heads = [f"{'?' if name == 'warm' else ''}>{name}" for name in regimes(result)]  # prefixes as `columns` takes them
    bound = next((q.time(cell.plan.floor_microseconds) for cell in cells if cell.plan and not cell.control), "not known")
    return Table(
        f"{shape.name}: {sizes(shape)}, {direction_words(direction)}; roofline bound {bound}",
        columns("variant", "status", *heads, f">speed ({regime or 'not timed'})", ">/ bound", "?>rounds"),
        tuple(rows),
    )


def _speed(gain: Estimate | None, *, is_reference: bool) -> str:
    return "the reference" if is_reference else q.ratio_interval(gain) if gain else q.NONE


def _shapes(result: Result) -> Section:
    rows = []
    for shape in result.study.shapes:
        plan = next((cell.plan for cell in result.cells if cell.shape == shape.name and cell.plan and not cell.control), None)
        known = (q.work(plan.flops), q.size(plan.least_bytes), q.time(plan.floor_microseconds)) if plan else (q.NONE,) * 3
        rows.append((shape.name, sizes(shape), shape.scale, *known))
    note = (
        "By arithmetic, for one forward call. The roofline bound is the longer of the times of the bytes and the FLOPs at the "
        "measured peaks. Shapes of a scale that did not run have none."
    )
    table = Table("", columns("shape", "sizes", "scale", ">matrix work", ">least bytes", ">roofline bound"), tuple(rows), note)
    return Section("Shapes", tables=(table,))


def _times(result: Result, direction: Direction) -> Section:
    tables = tuple(times_table(result, shape, direction) for shape in shapes(result, direction))
    reading = (READING,) if regimes(result) == REGIMES else (READING, _IN_A_ROW)
    return Section(f"All times, {direction_words(direction)}", reading, tables, folded=len(tables) > MANY)


def _savings(result: Result) -> Section:
    savings = result.decision.savings if result.decision else ()
    rows = tuple(
        (
            saving.shape,
            direction_words(saving.direction),
            saving.variant,
            q.time(saving.saved_microseconds),
            q.time(saving.by_bytes),
            q.time(saving.by_launches),
            q.time(saving.unexplained),
            source(saving.traffic_source),
        )
        for saving in savings
    )
    heads = columns("shape", "direction", "variant", ">saved", ">by bytes", ">by launches", ">unexplained", "bytes from")
    note = "Saved bytes over the measured bandwidth, saved launches times the measured time of a launch; the rest is unexplained."
    tables = (Table("", heads, rows, note),) if rows else ()
    return Section(f"Explanation of the time saved over {result.study.baseline}", tables=tables)


def _traffic(result: Result, direction: Direction) -> Section:
    """Return the section with bytes, launches and peak memory in one direction."""
    tables = []
    for shape in shapes(result, direction):
        cells = [cell for cell in cells_at(result, shape.name, direction) if cell.plan and not cell.control]
        if cells:
            heads = columns(
                "variant",
                ">launches",
                ">own bytes",
                ">planned",
                "?>read",
                "?>written",
                ">total / least",
                "bytes from",
                ">peak memory",
            )
            notes = sorted({cell.traffic.note for cell in cells if cell.traffic and cell.traffic.note})
            least = next(q.size(cell.plan.least_bytes) for cell in cells if cell.plan)
            title = f"{shape.name}: {sizes(shape)}, {direction_words(direction)}; least {least}"
            tables.append(Table(title, heads, tuple(_traffic_row(cell) for cell in cells), "; ".join(notes)))
    text = (
        "Own bytes: the fewest that this variant must move. Planned: the time of these bytes, its FLOPs and its launches at the "
        "measured peaks. Barriers: grid barriers, counted by the kernel. "
        "Read and written: bytes of one call, counted by the hardware (ncu) or by arithmetic. "
        "Peak memory: PyTorch's peak of allocated memory during one call, without the inputs but with outputs and gradients."
    )
    title = f"Bytes and launches, {direction_words(direction)}"
    return Section(title, (text,), tuple(tables), folded=len(tables) > MANY) if tables else Section(title)


def _traffic_row(cell: Cell) -> tuple[str, ...]:
    plan, traffic = cell.plan, cell.traffic
    launches = f"{cell.launches} counted" if cell.launches is not None else q.launches(plan.launches) if plan else q.NONE
    for measure in counted_measures():
        if measure.name != "launches" and (count := cell.count(measure.name)) is not None:
            launches += f", {q.plural(count, measure.noun)}"
    planned = (launches, q.size(plan.bytes), q.time(plan.planned_microseconds)) if plan else (q.NONE,) * 3
    moved = (q.NONE, q.NONE, q.NONE, "not counted")
    if traffic:
        share = q.ratio(traffic.total / plan.least_bytes) if plan and plan.least_bytes else q.NONE
        moved = (q.size(traffic.read), q.size(traffic.written), share, source(traffic.source))
    unknown = "not measured" if cell.measured else q.NONE
    return (cell.variant, *planned, *moved, q.size(cell.peak_bytes) if cell.peak_bytes is not None else unknown)


def _beside(result: Result) -> Section:
    """Return the section with the host times of calls beside those of PyTorch's matrix product."""
    rows = tuple(
        (
            cell.shape,
            direction_words(cell.direction),
            called(cell),
            q.interval(found.microseconds),
            q.interval(found.product),
            q.ratio_interval(found.ratio),
        )
        for cell in result.cells
        for found in cell.beside.values()
    )
    text = (
        "Time that the host needs for a call, the median over calls in a row while nobody waits for the device, and that of "
        "PyTorch's product of two [64, 64] bfloat16 matrices in the same process. On a CPU it holds the computation too."
    )
    heads = columns("shape", "direction", "variant", ">host", ">product", ">ratio")
    return Section("Host time", (text,), (Table("", heads, rows),)) if rows else Section("Host time")


def source(name: str) -> str:
    """Return the source of a number of bytes in words."""
    return {"ncu": "counted (ncu)", "analytic": "arithmetic"}[name]


def _correctness(result: Result) -> Section:
    """Return the section with the worst error of each output, by variant and direction."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in result.cells:
        if cell.verdict:
            groups.setdefault((cell.direction, cell.variant), []).append(cell)
    rows: list[tuple[str, ...]] = []
    for (direction, variant), cells in groups.items():
        passed = sum(cell.verdict.ok for cell in cells if cell.verdict)
        worst: dict[str, tuple[ComponentError, str]] = {}
        for cell in cells:
            for component in cell.verdict.components if cell.verdict else ():
                if component.name not in worst or _share(component) > _share(worst[component.name][0]):
                    worst[component.name] = (component, cell.shape)
        for component, shape in worst.values():
            right = f"{passed} of {len(cells)}"
            rows.append((variant, direction_words(direction), right, component.name, *_error_row(component), shape))
    heads = columns(
        "variant",
        "direction",
        ">correct",
        "output",
        ">worst error",
        ">allowed",
        "?>largest difference",
        "?>along the sequence",
        "?at",
    )
    note = (
        "Norm-wise errors against the float64 oracle, at the shape where each output is nearest to its limit. The limit is the "
        "smaller of the dtype's cap and twice the error of plain PyTorch in the same dtype or, if larger, the error that the "
        "operation states for a float32 result of 16-bit inputs. Along the sequence: errors of its first and its last part."
    )
    return Section("Correctness", tables=(Table("", heads, tuple(rows), note),) if rows else (), folded=len(rows) > 12)


def _error_row(component: ComponentError) -> tuple[str, ...]:
    parts = component.error_by_position
    drift = f"{q.scientific(parts[0])} to {q.scientific(parts[-1])}" if parts else q.NONE
    return (q.scientific(component.error), q.scientific(component.allowed), q.scientific(component.max_error), drift)


def _share(component: ComponentError) -> float:
    return component.error / component.allowed if component.allowed else float("inf")


def _noise(result: Result) -> Section:
    """Return the section with the A/A runs."""
    rows = tuple(
        (
            noise.shape,
            direction_words(noise.direction),
            noise.regime,
            q.ratio_interval(noise.ratio, 4),
            str(noise.ratio.samples),
            q.percent(noise.floor),
        )
        for noise in result.noise
    )
    heads = columns("shape", "direction", "regime", ">A/A ratio", ">rounds", ">smallest claim")
    note = f"{result.study.baseline} against itself: differences below the smallest claim are noise."
    return Section("Noise", tables=(Table("", heads, rows, note),) if rows else (), folded=len(rows) > 12)


def _history(result: Result) -> Section:
    notes = result.study.notes.strip()
    return Section("Reported before (history)", (_HISTORY,) if notes else (), notes=notes)


def _spent(result: Result) -> tuple[tuple[str, str], ...]:
    """Return the rows with the time and money that the run took; none for results that do not hold them."""
    if (spent := result.spent) is None:
        return ()
    rows = (
        ("wall time", q.duration(spent.wall_seconds)),
        ("device time (variants running)", q.duration(spent.device_seconds)),
    )
    if spent.cost is None or spent.price_per_hour is None:
        return rows
    return (*rows, ("cost", f"{q.money(spent.cost)}, at {q.money(spent.price_per_hour)} an hour of wall time"))


def _taken_over(result: Result, earlier: EarlierCommit) -> str:
    """Return which measurements of a result were made at an earlier commit. More than half are told by the others."""
    every = list(dict.fromkeys(case_name(cell.shape, cell.direction) for cell in result.cells))
    if 2 * len(earlier.measured) <= len(every):
        return f"measured {listing(earlier.measured)}"
    others = [name for name in every if name not in earlier.measured]
    return f"measured {'all but ' if others else 'everything'}{listing(others) if others else ''}"


def _provenance(result: Result) -> Section:
    """Return the section with the provenance and the measured peaks."""
    facts, ceilings = result.provenance, result.ceilings
    run = (
        ("device", f"{facts.device} ({facts.architecture})"),
        ("driver", facts.driver or "none"),
        *((name, version) for name, version in facts.versions.items()),
        ("commit", facts.commit or "not known"),
        *((f"commit {each.commit}, {each.date}", _taken_over(result, each)) for each in facts.earlier),
        ("date", facts.date),
        ("command", facts.command or "not recorded"),
        *_spent(result),
        ("scale, rounds", f"{facts.scale or 'not recorded'}, {facts.rounds}"),
        *((_CLOCKS.get(name, name.replace("_", " ")), q.number(value, 4)) for name, value in facts.clocks.items()),
        ("study digest", result.study_digest),
        ("schema", str(result.schema_version)),
    )
    rates: Iterable[tuple[str, str]] = (
        *(("read bandwidth", q.rate(rate, "B/s")) for rate in (ceilings.read_bytes_per_second,) if rate is not None),
        ("copy bandwidth", q.rate(ceilings.copy_bytes_per_second, "B/s")),
        *((f"matrix product, {dtype}", q.rate(rate, "FLOP/s")) for dtype, rate in ceilings.matrix_flops_per_second.items()),
        ("launch", q.time(1e6 * ceilings.launch_seconds)),
    )
    measured = f"Measured at {ceilings.measured_at} with {ceilings.software}."
    return Section(
        "Provenance and measured peaks",
        tables=(
            Table("Provenance", columns("fact", "value"), run),
            Table("Measured peaks of the device", columns("peak", ">measured"), tuple(rates), measured),
        ),
    )
