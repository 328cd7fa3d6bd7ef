"""The Dash app: its frame around the pages, the run and page that are shown, and access control."""

from __future__ import annotations

import gzip
import hashlib
import hmac
import sys
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update
from flask import Response, redirect, request
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response as Answer

from rankscope.analysis.model import digest
from rankscope.analysis.report import palette
from rankscope.analysis.report.html import chart_styles
from rankscope.analysis.text import units
from rankscope.analysis.text.message import LANGUAGES, language, speak, spoken, text
from rankscope.dashboard import grids
from rankscope.dashboard.at_once import COOKIE, LOCAL, SCHEME, at_once
from rankscope.dashboard.figures import plots
from rankscope.dashboard.page_kit import (
    HOME,
    Children,
    Page,
    address,
    all_pages,
    empty,
    in_language,
    query_of,
    quiet,
    run_in_language,
    with_choice,
)
from rankscope.dashboard.run import Run
from rankscope.dashboard.script_texts import words
from rankscope.dashboard.state import STAGES, Progress
from rankscope.dashboard.state import State as Runs

__all__ = ["create_app"]

_TICK_MS = 700
_GZIP_LEVEL = 1
_GZIP_LEVEL_ONCE, _BROTLI_LEVEL_ONCE = 9, 5  # of what is compressed once; the first page waits for it
_HAS_BROTLI = pa.Codec.is_available("brotli")
_SCRIPTS = ("text/javascript", "application/javascript", "text/css")
_KEEP = "max-age=31536000, immutable"
_CALLBACK = "/_dash-update-component"
_MOST_BODY_BYTES = 4 << 20

_INDEX = """<!DOCTYPE html>
<html lang="LANGUAGE">
<head>
{%metas%}
SCHEME
<script>window.rankscope_words = TEXTS_OF_SCRIPTS;</script>
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{%title%}</title>
<link rel="icon" href="data:,">
{%css%}
<style>
:root { color-scheme: light; LIGHT }
:root[data-scheme="dark"] { color-scheme: dark; DARK }
.chart-box { CHARTS }
PLOTS
</style>
</head>
<body>
HATCHES
{%app_entry%}
AT_ONCE
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>"""


_MENU = """(clicks, path, shown) => {
  const opens = dash_clientside.callback_context.triggered_id === "menu" && !shown;  // on its way to a page it closes
  return [opens ? "shows-navigation" : "", `${opens}`];
}"""
_PATIENCE_S = 0.5  # for what is kept of a report
_GOES = """<script>new MutationObserver((_, seen) => {
  if (document.querySelector("#page h1")) { document.getElementById("at-once").remove(); seen.disconnect(); }
}).observe(document.body, {childList: true, subtree: true});</script>"""


class _App(Dash):
    runs: Runs

    def interpolate_index(self, *args: Children, **parts: Children) -> Children:
        page = super().interpolate_index(*args, **parts)  # type: ignore[no-untyped-call]
        beginning = _beginning(self.runs, _page_name(request.path), request.args.get("run", ""))
        for name, said in (("LANGUAGE", LANGUAGES[language()]), ("TEXTS_OF_SCRIPTS", words()), ("AT_ONCE", beginning)):
            page = page.replace(name, said, 1)
        return page


def _beginning(runs: Runs, page: str, key: str) -> str:
    """Return what stands in Overview's place until it is drawn; empty where no report is known yet."""
    report = runs.kept_report(key, _PATIENCE_S) if page == HOME and key in runs.keys else None
    return f'<div id="at-once">{at_once(spoken(report))}</div>{_GOES}' if report else ""


def create_app(runs: Runs, *, token: str = "", host: str = "localhost", lang: str = "en") -> Dash:
    """Return the app on these runs.

    With a token, only browsers that have it get an answer; without, only this machine's do.

    A browser that asked for `?lang=zh` is answered in it from then on, the others in `lang`.
    """
    app = _App(
        __name__, title="rankscope", update_title="", suppress_callback_exceptions=True, include_pages_meta=False
    )
    app.runs = runs
    app.scripts.config.serve_locally = True
    app.css.config.serve_locally = True
    styles, hatches = chart_styles()
    app.index_string = (
        _INDEX.replace("SCHEME", SCHEME)
        .replace("LIGHT", palette.css_variables(palette.LIGHT))
        .replace("DARK", palette.css_variables(palette.DARK))
        .replace("CHARTS", styles)
        .replace("PLOTS", plots.styles())
        .replace("HATCHES", hatches)
    )
    app.layout = lambda: _frame(runs)
    usual = set(app.server.view_functions)  # Dash's own routes: a page's frame, its scripts and styles
    _guard(app, token, {*LOCAL, host}, usual)
    _speak(app, lang)
    _add_callbacks(app, runs)
    grids.register(app, runs)
    for page in all_pages().values():
        if page.register:
            page.register(app, runs)
    return app


def _add_callbacks(app: Dash, runs: Runs) -> None:
    """Add the callbacks of the frame around the pages."""
    app.callback(
        Output("page", "children"),
        Output("navigation", "children"),
        Output("which-run", "children"),
        Output("shown", "data"),
        Output("title", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
        Input("version", "data"),
        State("shown", "data"),
    )(lambda path, search, _, shown: _show(runs, path, search, shown))
    app.callback(
        Output("version", "data"),
        Output("status", "children"),
        Output("tick", "disabled"),
        Input("tick", "n_intervals"),
        Input("url", "pathname"),
        Input("url", "search"),
        State("version", "data"),
    )(lambda _, path, search, version: _tick(runs, _page_name(path), query_of(search).get("run", ""), version))
    app.clientside_callback(  # type: ignore[no-untyped-call]
        "async (clicks) => navigator.clipboard.writeText(location.href).then(() => '✓')",
        Output("copy-link", "children"),
        Input("copy-link", "n_clicks"),
        prevent_initial_call=True,
    )
    app.clientside_callback(  # type: ignore[no-untyped-call]
        "(title) => { document.title = title; return dash_clientside.no_update; }",
        Output("title", "storage_type"),
        Input("title", "data"),
    )
    app.clientside_callback(  # type: ignore[no-untyped-call]
        _MENU,
        Output("shell", "className"),
        Output("menu", "aria-expanded"),
        Input("menu", "n_clicks"),
        Input("url", "pathname"),
        State("shell", "className"),
    )
    app.clientside_callback(  # type: ignore[no-untyped-call]
        "(clicks) => { if (clicks) rankscope_other_scheme(); return dash_clientside.no_update; }",
        Output("scheme", "disabled"),
        Input("scheme", "n_clicks"),
    )
    app.callback(
        Output("url", "search", allow_duplicate=True),
        Input({"kind": "choice", "name": ALL, "shown": ALL, "drops": ALL}, "value"),
        State("url", "search"),
        prevent_initial_call=True,
    )(lambda _, search: _choose(ctx.triggered_id, ctx.triggered[0]["value"], search))


def _frame(runs: Runs) -> Children:
    first = runs.progress("")
    named: dict[str, Any] = {"aria-label": spoken(text("Navigation"))}
    header = html.Header(
        [
            html.Button("☰", id="menu", n_clicks=0, **named),
            dcc.Link("rankscope", href="/", className="brand"),
            html.Div(id="which-run"),
            html.Div(id="status"),
            html.Button("Ctrl-K", className="palette-opens", title=spoken(text("Pages, ranks and commands"))),
            html.Button(spoken(text("Copy link")), id="copy-link", title=spoken(text("Copy a link to this view"))),
            html.Button("◐", id="scheme", title=spoken(text("Light or dark"))),
        ]
    )
    version = f"{first.version}"
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            dcc.Interval(id="tick", interval=_TICK_MS),
            dcc.Store(id="version", data={"": version}),
            dcc.Store(id="shown"),
            dcc.Store(id="title"),
            html.A(spoken(text("Skip to the page")), href="#page", className="skip"),
            header,
            html.Nav(id="navigation"),
            html.Main(id="page", tabIndex="-1"),
        ],
        id="shell",
    )


def _page_name(path: str | None) -> str:
    return (path or "/").strip("/") or HOME


def _show(runs: Runs, path: str | None, search: str | None, shown: list[str] | None) -> tuple[Any, ...]:
    """Return the page that the address names, its navigation, the run's name, what is on screen now, the title."""
    query = query_of(search)
    name = _page_name(path)
    key = query.get("run", "")
    page = all_pages().get(name)
    navigation = _navigation(name, key, len(runs.keys))
    if key not in runs.keys or page is None:
        what = (
            text("No run “{key}” was opened here.", key=key)
            if key not in runs.keys
            else text("There is no page “{name}”.", name=name)
        )
        return in_language(empty(text("Nothing here"), what)), navigation, None, None, "rankscope"
    progress = runs.progress(key)
    title = f"{spoken(page.title)} · {progress.name} · rankscope"
    now = [name, key, search or "", "ready" if progress.run else "loading"]
    if shown == now and progress.run and page.keeps:
        return (no_update,) * 5
    if progress.run is None:
        return _early(progress, page, key), navigation, _run_names(runs, name, key), now, title
    return (
        in_language(page.layout(run_in_language(progress.run, language()), query)),
        navigation,
        _run_names(runs, name, key),
        now,
        title,
    )


def _early(progress: Progress, page: Page, key: str) -> Children:
    """Return a page's content for a run that is still being read."""
    if progress.scene is not None and page.early:
        return page.early(key)
    if progress.report is not None and page.of_report:
        return in_language(page.of_report(spoken(progress.report), key))
    return _loading(progress)


def _choose(select: Mapping[str, str] | None, value: str | None, search: str) -> Children:
    """Return the address with what was chosen; a select that has just been shown chooses nothing."""
    if not select or value in (None, select["shown"]):
        return no_update
    return with_choice(search, **dict.fromkeys(select["drops"].split(), ""), **{select["name"]: value})


def _navigation(current: str, run: str, opened: int) -> list[Any]:
    return [
        dcc.Link(spoken(page.title), href=address(name, run), className=f"nav-link{' on' * (name == current)}")
        for name, page in all_pages().items()
        if opened > 1 or not page.of_two
    ]


def _run_names(runs: Runs, page: str, current: str) -> Children:
    """Return the name of the run, or links to all of them, and which steps of a long one its tables hold.

    And the ranks of the one that is shown, for the palette.
    """
    run = runs.progress(current).run
    known: dict[str, Any] = {"data-ranks": units.ranges(run.timeline.ranks["rank"]) if run else ""}
    if len(runs.keys) == 1:
        name = runs.progress("").name
        return [html.Span(name, className="run-name", title=name, **known), _held(run)]
    links = [
        dcc.Link(runs.progress(key).name, href=address(page, key), className=f"run-name{' on' * (key == current)}")
        for key in runs.keys
    ]
    return [html.Div(links, className="run-names", **known), _held(run)]


def _held(run: Run | None) -> Children:
    history = run.report.history if run else None
    if history is None:
        return None
    said = text(
        "tables of steps {first}-{last} of {count}",
        first=history.read.first,
        last=history.read.last,
        count=history.count,
    )
    return html.Span(spoken(said), className="quiet")


def _loading(progress: Progress) -> Children:
    """Return the progress; or, if it failed, why."""
    if progress.error:
        said = spoken(text("{name} cannot be shown", name=progress.name))
        return html.Div([html.H2(said), html.P(progress.error)], className="notice failed", role="alert")
    stages = [
        html.Li(
            f"{said} …" if i == progress.stage else said, className=("done", "now", "later")[_order(i, progress.stage)]
        )
        for i, said in enumerate(map(spoken, STAGES))
    ]
    return html.Div(
        [
            html.Div(className="spinner"),
            html.Div(
                [html.H1(spoken(text("Opening {name}", name=progress.name))), html.Ol(stages, className="stages")]
            ),
        ],
        className="loading",
    )


def _order(a: int, b: int) -> int:
    return (a > b) - (a < b) + 1


def _tick(runs: Runs, page: str, key: str, version: dict[str, str]) -> tuple[Any, Any, bool]:
    """Return the version if it is a new one, the run's state for the header, and whether nothing more is to come."""
    if key not in runs.keys:
        return no_update, None, True
    progress = runs.progress(key)
    now = {key: str(progress.version)}
    is_final = progress.run is not None and not progress.run.running
    return (no_update if version == now else now), _status(progress, page), is_final


def _status(progress: Progress, page: str) -> Children:
    run = progress.run
    if run is None:
        return None if progress.scene is None else quiet(progress.error or f"{STAGES[progress.stage]} …")
    said = "" if page == HOME else spoken(run.report.verdict)  # there it is the headline
    verdict = html.Div(said, className=f"verdict-line {digest.status(run.report) if said else ''}", title=said)
    if not run.running:
        return verdict
    read_at = time.strftime("%H:%M:%S", time.localtime(run.read_at))
    badge = html.Span(spoken(text("still running · as of {time}", time=read_at)), className="badge")
    return html.Div([badge, verdict], className="status")


class _Callback(msgspec.Struct):
    """The fields of requests of Dash's own page; a body without them is refused before Dash works on it."""

    output: str
    inputs: list[Any]
    outputs: dict[str, Any] | list[Any] | None = None
    state: list[Any] | None = None


def _guard(app: Dash, token: str, hosts: set[str], usual: set[str]) -> None:
    """Refuse other sites' pages and requests without the token; an invalid body gets one line, no traceback."""
    cookie = f"rankscope-{hashlib.sha256(token.encode()).hexdigest()[:8]}"  # servers of other ports have their own
    app.server.config["MAX_CONTENT_LENGTH"] = _MOST_BODY_BYTES

    def check() -> Answer | None:
        if not token and urlsplit(f"//{request.host}").hostname not in hosts:
            return Response("rankscope answers to its own address only\n", 403)
        works = request.method not in ("GET", "HEAD") or request.endpoint not in usual
        if not _is_own(works=works and not token):
            return Response("rankscope answers to its own pages only: enter this address by hand to open it\n", 403)
        return ask() if token else None

    def ask() -> Answer | None:
        if hmac.compare_digest(request.args.get("token", "").encode(), token.encode()):
            answer = redirect(request.path)
            answer.set_cookie(cookie, token, httponly=True, samesite="Strict")
            return answer
        if hmac.compare_digest(request.cookies.get(cookie, "").encode(), token.encode()):
            return None
        return Response(_ASK, 401, mimetype="text/html")

    def check_body() -> Response | None:
        if request.path != _CALLBACK or request.method != "POST":
            return None
        try:
            msgspec.json.decode(request.get_data(), type=_Callback)
        except (msgspec.MsgspecError, RecursionError) as error:
            return Response(f"this is no request of rankscope's own pages: {error}\n", 400, mimetype="text/plain")
        return None

    def fail(error: Exception) -> Response | HTTPException:
        """One line for a request that cannot be answered; Dash and Flask would write a traceback."""
        if isinstance(error, HTTPException):
            return error
        print(f"rankscope: {request.path} failed: {type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
        return Response("this could not be answered; rankscope's terminal says why\n", 500, mimetype="text/plain")

    app.server.before_request(check)
    app.server.before_request(check_body)
    app.server.register_error_handler(Exception, fail)

    def seal(response: Response) -> Response:
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    app.server.after_request(seal)
    _pack(app)


def _pack(app: Dash) -> None:
    """Compress what is sent: pages are JSON, large with thousands of ranks; scripts are megabytes, the same for all.

    Browsers keep what has its version in its address, and ask for the rest again only whether it has changed.
    """
    scripts: dict[tuple[str, bytes], bytes] = {}  # compressed, by coding and digest: twice as many as there are files

    def of_script(coding: str, data: bytes) -> bytes:
        key = coding, hashlib.sha256(data).digest()
        if key not in scripts:
            is_gzip = coding == "gzip"
            scripts[key] = gzip.compress(data, _GZIP_LEVEL_ONCE, mtime=0) if is_gzip else brotli(data)
        return scripts[key]

    def brotli(data: bytes) -> bytes:
        packed: bytes = pa.Codec("brotli", compression_level=_BROTLI_LEVEL_ONCE).compress(data, asbytes=True)
        return packed

    def pack(response: Response) -> Response:
        is_script = request.method == "GET" and response.mimetype in _SCRIPTS and response.status_code == 200
        if is_script:
            response.direct_passthrough = False
            if request.args.get("m"):  # a file of ours, with the time of its last change
                response.headers["Cache-Control"] = _KEEP
            elif not response.cache_control.max_age:
                response.add_etag(weak=True)
                response.headers["Cache-Control"] = "no-cache"
        if not is_script and response.mimetype != "application/json":
            return response
        response.vary.add("Accept-Encoding")
        codings = ("br", "gzip") if is_script and _HAS_BROTLI else ("gzip",)
        coding = next((one for one in codings if request.accept_encodings[one]), None)
        if coding:
            data = response.get_data()
            response.set_data(of_script(coding, data) if is_script else gzip.compress(data, _GZIP_LEVEL))
            response.headers["Content-Encoding"] = coding
        if is_script:
            response.make_conditional(request)
        return response

    app.server.after_request(pack)


def _is_own(*, works: bool) -> bool:
    """Say whether a request comes from a page of this server, or was entered by hand.

    Browsers say so (Sec-Fetch-Site), but for addresses of other machines without TLS. Where they do not, a request that
    `works`, which a page of another site could make with a mere link, must name its origin.
    """
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("Origin")
    if origin is not None:
        return urlsplit(origin).netloc == request.host
    return not works or request.method not in ("GET", "HEAD")


def _speak(app: Dash, usual: str) -> None:
    """Answer each request in the language of its address, else in that of its cookie, else in the usual one."""

    def choose() -> None:
        asked = request.args.get("lang", request.cookies.get(COOKIE, ""))
        speak(asked if asked in LANGUAGES else usual)

    def keep(response: Response) -> Response:
        if request.args.get("lang") in LANGUAGES:
            response.set_cookie(COOKIE, language(), samesite="Strict")
        return response

    app.server.before_request(choose)
    app.server.after_request(keep)


_ASK = """<!doctype html><html lang="en"><title>rankscope</title>
<form style="font: 16px/1.5 system-ui, sans-serif; margin: 15vh auto; max-width: 24em">
<label>The token that <code>rankscope ui</code> printed:<br>
<input name="token" type="password" autofocus style="font: inherit; width: 100%; margin: .5em 0"></label>
<button style="font: inherit">Open</button></form></html>
"""
