"""How the stages of a pipeline go through their microbatches, against the schedule's theory."""

from __future__ import annotations

import polars as pl
from dash import html

from rankscope.analysis.model.finding import Pipeline
from rankscope.analysis.report.labels import say
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import percent
from rankscope.dashboard.figures import pipeline as figures
from rankscope.dashboard.grids import Shown, plain_table
from rankscope.dashboard.page_kit import Children, Page, Query, card, choice, empty, heading, plot
from rankscope.dashboard.run import Run

_MEANING = text("Forward and backward of each microbatch by stage. What is empty between them is bubble.")


def layout(run: Run, query: Query) -> Children:
    ops = run.timeline.ops
    if ops.is_empty():
        why = text("No operations of pipeline stages were recorded.")
        what = text(
            "Runs of torch.distributed.pipelining that rankscope recorded have them, ByteDance's operation traces and "
            "Primus' pipeline files."
        )
        return html.Div([heading(page.title, _MEANING), empty(text("No pipeline"), why, what)])
    steps, replicas = (ops[name].unique().sort().to_list() for name in ("step", "replica"))
    step = figures.typical_step(ops, run.timeline.steps.filter("judged").select("step"))
    step, replica = (
        int(asked) if (asked := query.get(name, "")).lstrip("-").isdigit() and int(asked) in known else default
        for name, known, default in (("step", steps, step), ("replica", replicas, replicas[0]))
    )
    controls = [
        choice("step", text("Step"), [str(n) for n in steps], str(step)),
        choice("replica", text("Replica"), [str(n) for n in replicas], str(replica)),
    ]
    summary = run.report.pipeline
    return html.Div(
        [
            heading(page.title, _MEANING),
            _summary(run, summary) if summary else None,
            html.Div(controls, className="controls"),
            html.Div(_charts(run, step, replica)),
        ]
    )


def _charts(run: Run, step: int, replica: int) -> list[Children]:
    measured = figures.computations(run.timeline.ops, step, replica)
    if measured.is_empty():
        return [
            empty(
                text("Nothing to show"),
                text("Replica {replica} computed nothing in step {step}.", replica=replica, step=step),
            )
        ]
    ideal = figures.ideal(measured)
    longest = max(int(str(frame["end_ns"].max())) for frame in (measured, ideal) if frame is not None)
    height = 120 + 34 * measured["stage"].n_unique()
    no_theory = text("Stages lack microbatches: no ideal is drawn for that.")
    return [
        card(text("Measured"), plot(figures.chart(measured, longest), height=height)),
        card(
            text("In theory"),
            plot(figures.chart(ideal, longest), height=height) if ideal is not None else html.P(no_theory),
            note=text("The same order, if all stages were equally fast and nothing but their computation took time."),
        ),
    ]


def _summary(run: Run, pipeline: Pipeline) -> Children:
    shape = say("pipeline.shape", pipeline.schedule, pipeline.stages, pipeline.microbatches)
    theory = (
        text("; bubble in theory {share}", share=percent(pipeline.theory_fraction))
        if pipeline.theory_fraction is not None
        else ""
    )
    rows = pl.DataFrame(
        [(stage, fraction) for stage, fraction in sorted(pipeline.bubble.items())],
        schema={"stage": pl.Int64, "bubble": pl.Float64},
        orient="row",
    )
    columns = {"stage": Shown(text("stage")), "bubble": Shown(text("bubble, mean of its steps"), "share")}
    return card(
        f"{shape}{theory}",
        html.P(pipeline.explanation),
        html.Div(plain_table(run.key, rows, columns), className="narrow"),
    )


page = Page(title=text("Pipeline"), order=50, layout=layout)
