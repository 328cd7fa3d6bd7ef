"""What is said of a finding wherever it is shown: who, where, since when, what it costs and what to do."""

from __future__ import annotations

from rankscope.analysis.model.finding import Finding, Report
from rankscope.analysis.report import phrases
from rankscope.analysis.report.labels import detector_name, say
from rankscope.analysis.text.phrases import some_ranges

__all__ = ["COST", "finding_facts"]

COST = "finding.cost"


def finding_facts(report: Report, finding: Finding) -> list[tuple[str, str, str]]:
    """Of each fact that is known its id, its name and its value."""
    facts = {
        "finding.who": phrases.who(finding.ranks, finding.nodes, finding.groups),
        "finding.where": phrases.label(finding.where),
        "finding.code": finding.code,
        "finding.steps": some_ranges(finding.steps),
        "finding.level": phrases.level(finding),
        COST: phrases.cost(report, finding),
        "finding.others_waited": phrases.others_waited(report, finding),
        "finding.gain": phrases.gain(report, finding),
        "finding.advice": finding.advice,
        "finding.cause": detector_name(finding.caused_by) if finding.caused_by else "",
    }
    return [(name, say(name), value) for name, value in facts.items() if value]
