"""What the ranks' main threads did, as a flame graph: of all ranks, of one, or of one against the others."""

from __future__ import annotations

from dash import dcc, html

from rankscope.analysis.diagnosis.judged_tables import code_of
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.text.units import percent
from rankscope.analysis.timeline.code_samples import Code
from rankscope.dashboard.components import Chart
from rankscope.dashboard.figures.flame import flame, matching
from rankscope.dashboard.page_kit import Children, Page, Query, address, card, choice, choice_of_text, empty, heading
from rankscope.dashboard.run import Run

_MEANING = text(
    "Calls of main threads in the analyzed steps, or in the whole run if there are none, from samples; without those "
    "of torch and of Python's library. Click one to enlarge it."
)
_LEAST_SHARE = 0.002  # of a call, to be drawn
_ALL, _OTHERS, _NONE = "all", "others", "none"


def layout(run: Run, query: Query) -> Children:
    code = code_of(run.timeline)
    if code.samples.is_empty():
        why = run.trace.reader.cannot().get("samples", text("No samples of the main threads were recorded."))
        return html.Div([heading(page.title, _MEANING), empty(text("No flame graph"), why)])
    ranks = code.samples["rank"].unique().sort().to_list()
    asked = query.get("rank", _ALL)
    rank = int(asked) if asked.isdigit() and int(asked) in ranks else None
    against = rank is not None and len(ranks) > 1 and query.get("against", _OTHERS) == _OTHERS
    options = [{"value": _ALL, "label": text("all ranks")}]
    options += [{"value": str(one), "label": text("rank {rank}", rank=one)} for one in ranks]
    compared = [{"value": _OTHERS, "label": text("the others' mean")}, {"value": _NONE, "label": text("nothing")}]
    controls = [
        choice("rank", text("Rank"), options, _ALL if rank is None else str(rank), drops="root"),
        choice("against", text("against"), compared, _OTHERS if against else _NONE)
        if rank is not None and len(ranks) > 1
        else None,
        choice_of_text("find", text("Search"), query.get("find", ""), text("function or file")),
    ]
    chart = _chart(run, code, query, rank, against=against)
    return html.Div([heading(page.title, _MEANING), html.Div(controls, className="controls"), chart])


def _chart(run: Run, code: Code, query: Query, rank: int | None, *, against: bool) -> Children:
    of = code if rank is None else code.of_ranks([rank])
    tree = code.difference(rank, _LEAST_SHARE) if against and rank is not None else of.tree(_LEAST_SHARE)
    cause = {place for finding in run.report.findings for place in code.places_of(finding)}
    calls, found = counted(len(tree), "call"), None
    said = text("{samples:,} samples, {calls} with 0.2 % of them or more", samples=len(of.samples), calls=calls)
    if wanted := query.get("find"):
        found, share = matching(tree, wanted)
        said = text("{calls} found: {share} of the time", calls=counted(len(found), "call"), share=percent(share))
    kept = {name: word for name, word in query.items() if name not in ("run", "root")}
    root = int(query["root"]) if query.get("root", "").isdigit() else 0
    drawn = flame(
        tree,
        of.step_ns,
        lambda place: address("flame", run.key, **kept, root=place),
        root=root,
        cause=cause,
        found=found,
    )
    whole = dcc.Link(text("Show all calls"), href=address("flame", run.key, **kept), className="button")
    return card(
        "",
        html.Div([html.Span(said, id="flame-said"), whole if root else None], className="controls small"),
        _legend() if against else None,
        Chart(drawn, title=page.title),
    )


def _legend() -> Children:
    colors = {
        "high": text("longer than on the others"),
        "low": text("shorter"),
        "column": text("not clear of chance"),
    }
    marks = [html.Li([html.I(style={"background": f"var(--{color})"}), said]) for color, said in colors.items()]
    return html.Ul(marks, className="levels")


page = Page(title=text("Flame graph"), order=55, layout=layout)
