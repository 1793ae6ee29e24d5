"""Command ``onelaunch study show``: a study's declaration, and its plan by arithmetic, before anything runs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding

from onelaunch.cli import output
from onelaunch.cli.arguments import DeviceName
from onelaunch.cli.study.arguments import ScaleName, StudyName
from onelaunch.device.hardware import describe, resolve
from onelaunch.device.peaks import ceilings
from onelaunch.errors import UnknownShape
from onelaunch.operation import Direction
from onelaunch.wording import escaped
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.predictions import predicted
from onelaunch.workbench.report.summary import asked, direction_words, sizes
from onelaunch.workbench.report.tables import Table, columns, words
from onelaunch.workbench.study import Shape, Study
from onelaunch.workbench.study.plan import PlannedCell, StudyPlan, guarantee, plan_study, scale_for
from onelaunch.workbench.study.read import find_study


def show(
    name: StudyName,
    device: DeviceName = "auto",
    scale: ScaleName = None,
    at: Annotated[str | None, typer.Option("--at", help="Shape whose variants are listed.", show_default="the first")] = None,
) -> None:
    """Show a study's declaration and plan: costs, roofline bounds and feasibility.

    No variant is run. The roofline bounds follow from the device's peaks, which are measured once (in seconds) and stored.

    Example: onelaunch study show 040-linear-rnn --scale full
    """
    path, study = find_study(name)
    chosen = str(resolve(device))
    with output.busy(f"Reading the measured peaks of {chosen} (measured once, then stored)"):
        rates = ceilings(chosen)
    plan = plan_study(study, rates, chosen, scale or scale_for(describe(chosen).type))
    console = output.stdout()
    output.heading(console, study.name, study.question)
    console.print(
        f"{escaped(str(path))} · operation {study.operation} · baseline {study.baseline} · {study.rounds} rounds",
        style="dim",
        markup=False,
    )
    console.print(f"Regimes: {', '.join(study.regimes)}. Directions: {', '.join(map(direction_words, study.directions))}.")
    if study.notes:
        console.print("Reported before (history):", style="dim")
        console.print(Padding(Markdown(study.notes), (0, 2)), style="dim")
    output.heading(console, "\nCriteria")
    _show_criteria(console, study, plan)
    if study.predictions:
        output.heading(console, "Predictions")
        rows = tuple((predicted(study, each), each.by, each.why) for each in study.predictions)
        output.table(console, Table("", columns("prediction", "by", "why"), rows))
    output.heading(console, f"Plan for {describe(chosen).name}, {plan.scale} scale")
    if not plan.shapes:
        console.print(f"The study has no shapes of scale {plan.scale}. Choose the other scale with --scale.")
        return
    for direction in study.directions:
        output.table(console, _shapes(plan, direction))
    for direction in study.directions:
        if _cells(plan, _shape(plan, at), direction):
            output.table(console, _variants(plan, _shape(plan, at), direction))


def _show_criteria(console: Console, study: Study, plan: StudyPlan) -> None:
    if not study.criteria:
        console.print("None. Such a study measures but decides nothing.")
        return
    rows = tuple(
        (
            criterion.name,
            "infeasible" if criterion.name in plan.infeasible else "vacuous" if guarantee(study, criterion) else "feasible",
            _demand(asked(criterion, study), plan.infeasible.get(criterion.name) or guarantee(study, criterion)),
        )
        for criterion in study.criteria
    )
    output.table(console, Table("", columns("criterion", "status", "asked"), rows))


def _demand(demand: str, refuted: str | None) -> str:
    return f"{demand}; but {refuted}" if refuted else demand


def _shape(plan: StudyPlan, name: str | None) -> Shape:
    if name is None:
        return plan.shapes[0]
    found = next((shape for shape in plan.shapes if shape.name == name), None)
    if found is None:
        raise UnknownShape(name, [shape.name for shape in plan.shapes])
    return found


def _cells(plan: StudyPlan, shape: Shape, direction: Direction) -> list[PlannedCell]:
    return [cell for cell in plan.cells if cell.shape.name == shape.name and cell.direction == direction]


def _shapes(plan: StudyPlan, direction: Direction) -> Table:
    rows = []
    for shape in plan.shapes:
        cells = [cell for cell in _cells(plan, shape, direction) if not cell.control]
        if not cells:  # this shape has directions of its own
            continue
        least = cells[0].plan  # least bytes and roofline bound are those of the operation, equal for all its variants
        able = sum(cell.status is None for cell in cells)
        rows.append(
            (
                shape.name,
                sizes(shape),
                q.size(least.least_bytes),
                q.time(least.floor_microseconds),
                f"{able} of {len(cells)}",
            )
        )
    heads = columns("shape", "sizes", ">least bytes", ">roofline bound", ">variants that run")
    return Table(
        direction_words(direction).capitalize(),
        heads,
        tuple(rows),
        "No variant can be faster than the roofline bound in the cold regime.",
    )


def _variants(plan: StudyPlan, shape: Shape, direction: Direction) -> Table:
    rows = tuple(_variant_row(cell) for cell in _cells(plan, shape, direction))
    # > aligns a column to the right, ? leaves it out on a narrow terminal.
    heads = columns("variant", ">launches", ">own bytes", "?>matrix work", ">planned", "status", "reason")
    note = (
        "Planned: time of the variant's own bytes, FLOPs and launches at the measured peaks. Any time beyond it has other causes."
    )
    return Table(f"At {shape.name}, {direction_words(direction)}", heads, rows, note)


def _variant_row(cell: PlannedCell) -> tuple[str, ...]:
    plan = cell.plan
    return (
        f"{cell.variant} (control)" if cell.control else cell.variant,
        q.launches(plan.launches),
        q.size(plan.bytes),
        q.work(plan.flops),
        q.time(plan.planned_microseconds),
        words(cell.status) if cell.status else "runs",
        cell.reason,
    )
