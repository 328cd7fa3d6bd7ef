"""What a browser shows of a run before the pages' scripts have arrived: the verdict and the findings, as plain HTML.

`Front` answers with it while the app is imported, the app in the frame of its first page. Nothing here imports Dash.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from werkzeug.wrappers import Request, Response

from rankscope.analysis.diagnosis.kept_report import KeptReport
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.model.finding import Report
from rankscope.analysis.report.palette import DARK, LIGHT, css_variables
from rankscope.analysis.report.view import COST, View, view_of
from rankscope.analysis.text.message import LANGUAGES, speaking, spoken, text

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["COOKIE", "LOCAL", "SCHEME", "Front", "at_once", "facts_with_rate"]

COOKIE = "rankscope-language"
LOCAL = ("localhost", "127.0.0.1", "::1")
SCHEME = Markup("""<script>{
const system = matchMedia("(prefers-color-scheme: dark)"), look = document.documentElement.dataset;
const follow = () => { look.scheme = localStorage.getItem("rankscope-scheme") ?? (system.matches ? "dark" : "light"); };
system.addEventListener("change", follow);
window.rankscope_other_scheme = () => {
  localStorage.setItem("rankscope-scheme", look.scheme === "dark" ? "light" : "dark");
  follow();
};
follow();
}</script>""")
_HERE = Path(__file__).parent


def at_once(report: Report) -> Markup:
    """Return the beginning of Overview, of a report in the language that is spoken."""
    view = view_of(report)
    return Markup(_template("at_once").render(view=view, facts=facts_with_rate(view), COST=COST))


def facts_with_rate(view: View) -> list[str]:
    """Return the line of facts below the verdict, with the rate of steps."""
    mean_ns = view.report.steps.mean_ns
    rate = [spoken(text("{rate:.3g} steps per second", rate=1000000000.0 / mean_ns))] if mean_ns else []
    return [*filter(None, view.facts), *rate]


class Front:
    """The server's application until the app is there: a browser that opens a page reads what is kept of the run.

    All else waits for the app. `hosts` are the names by which browsers may call this server; with a token there are
    none, since the app asks for it.
    """

    def __init__(self, run: Path, *, price: float | None, lang: str, hosts: Collection[str]) -> None:
        self._name, self._lang, self._hosts = run.resolve().name, lang, hosts
        self._report = KeptReport([run], ReportOptions(price=price)).load()
        self._app: WSGIApplication | None = None
        self._is_open = threading.Event()

    def open(self, app: WSGIApplication) -> None:
        self._app = app
        self._is_open.set()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if self._app is None:
            request = Request(environ)
            is_page = request.headers.get("Sec-Fetch-Mode") == "navigate" and request.method == "GET"
            if is_page and urlsplit(f"//{request.host}").hostname in self._hosts:
                return self._opening(request)(environ, start_response)
            self._is_open.wait()
        assert self._app is not None
        return self._app(environ, start_response)

    def _opening(self, request: Request) -> Response:
        asked = request.args.get("lang", request.cookies.get(COOKIE, ""))
        language = asked if asked in LANGUAGES else self._lang
        is_overview = request.path == "/" and not request.args.get("run")
        with speaking(language):
            page = _template("opening").render(
                lang=LANGUAGES[language],
                scheme=SCHEME,
                light=css_variables(LIGHT),
                dark=css_variables(DARK),
                styles=Markup((_HERE / "assets" / "style.css").read_text(encoding="utf-8")),
                name=self._name,
                verdict=at_once(spoken(self._report)) if is_overview and self._report else None,
                said=spoken(text("Opening {name}", name=self._name)),
            )
        return Response(page, mimetype="text/html", headers={"Cache-Control": "no-store", "X-Frame-Options": "DENY"})


@cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(f"{name}.html.j2")
