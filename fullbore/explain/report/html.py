"""The answer as one self-contained page with plots."""

from __future__ import annotations

from html import escape
from typing import Any

from fullbore.explain.report import svg
from fullbore.explain.situation import Situation

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.5rem}
h2{font-size:1.15rem;margin-top:2rem;border-bottom:1px solid #d0d7de}
h3{font-size:1rem;margin-bottom:.2rem}
code{background:#f2f4f7;padding:.1rem .3rem;border-radius:3px;word-break:break-word}
li{margin:.2rem 0}
.w{color:#57606a;font-size:.85em}
.bad{color:#b42318}
.good{color:#157347}
.p{background:#f2f4f7;padding:.6rem .8rem;border-radius:6px}
svg{width:100%;margin:1rem 0;font:12px system-ui,sans-serif;fill:#1b1f24}
svg .t{font-weight:600;font-size:13px}
svg .b{fill:#e6eaef}
svg .f{fill:#2563a8}
svg .m,svg .a{stroke:#8a94a0}
svg .m{stroke-dasharray:4 3}
svg .c{fill:none;stroke:#2563a8}
@media(prefers-color-scheme:dark){body{background:#14181d;color:#e6eaef}
svg{fill:#e6eaef}
code,.p{background:#232a32}
svg .b{fill:#2c343d}
svg .f{fill:#6ea8e0}
svg .c{stroke:#6ea8e0}
.w{color:#9aa5b1}
.bad{color:#ff8a80}
.good{color:#6fd59b}}
"""
_GOOD = ("at-roofline", "pp-latency-expected")
_TRACE_SHOWN = 12  # rounds of the pipeline


def page(s: Situation, answer: dict[str, Any]) -> str:
    """HTML without anything to load; everything from the evidence is escaped."""
    primary = answer["verdicts"][0]
    kind = "good" if primary["id"] in _GOOD else "bad"
    body = [f'<h1>fullbore explain: <span class="{kind}">{escape(primary["id"])}</span></h1>']
    body += [_verdict(verdict) for verdict in answer["verdicts"]]
    body.append("<h2>Plots</h2>" + "".join(_plots(s)))
    body.append(_facts("Found, but not the bottleneck", answer["not_the_bottleneck"]))
    body.append(_missing(answer["missing"]))
    body.append(_facts("What the evidence says", answer["facts"]))
    body.append(_files(answer))
    title = f"fullbore explain: {escape(primary['id'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _verdict(verdict: dict[str, Any]) -> str:
    parts = [
        f"<h2>{escape(verdict['id'])}, {escape(verdict['confidence'])}</h2><p "
        f'class="p">{escape(verdict["summary"])}</p>'
    ]
    parts.append(_facts("Evidence for", verdict["evidence"], "h3"))
    parts.append(_facts("Evidence against", verdict["against"], "h3"))
    if verdict["unexplained"]:
        parts.append(f"<h3>Unexplained</h3><p>{escape(verdict['unexplained'])}</p>")
    if verdict["id"] == "insufficient-evidence":
        return "".join(parts)  # what to do next is what is missing
    fixes = "".join(f"<li><code>{escape(line)}</code></li>" for line in verdict["fix"])
    parts.append(f"<h3>Fix</h3><ul>{fixes}</ul>")
    parts.append(_facts("In the engine's source", verdict["proof"], "h3"))
    gain = verdict["gain"]
    assumes = f" <span class='w'>assumes: {escape(gain['assumes'])}</span>" if gain["assumes"] else ""
    parts.append(f"<p><b>Gain:</b> {escape(gain['text'])}{assumes}</p>")
    parts.append(f"<p><b>Verify:</b> {escape(verdict['verify'])}</p>" if verdict["verify"] else "")
    parts.append(f"<p class='w'>Known from: {escape(verdict['source'])}</p>" if verdict["source"] else "")
    return "".join(parts)


def _plots(s: Situation) -> list[str]:
    plots = []
    if s.busy is not None:
        labels = [f"stage {n}" for n in range(len(s.busy.shares))]
        most = s.load.most
        mark = 100 * min(most / len(labels), 1.0) if most is not None and len(labels) > 1 else None
        title = f"Busy, by stage ({s.busy.kind}); the line: what the requests in flight allow"
        plots.append(svg.bars(title, labels, [100 * share for share in s.busy.shares], 100, "%", mark))
    loaded = [gpu for gpu in s.gpus if gpu.load.power_w]
    if loaded:
        limit = max(gpu.power_limit_w or gpu.load.power_w.maximum for gpu in loaded)
        labels = [s.evidence.masker.mask(gpu.label) for gpu in loaded]
        plots.append(svg.bars("Power under load", labels, [gpu.load.power_w.mean for gpu in loaded], limit, "W"))
    points = [
        (float(row.concurrency), row.output_tok_s) for row in s.evidence.bench if row.concurrency and row.output_tok_s
    ]
    if len(points) > 1:
        plots.append(svg.lines("Output tokens/s by concurrency", points, "concurrency", "tokens/s"))
    if s.timeline is not None and s.timeline.is_complete and s.timeline.period_us:
        plots.append(_trace_plot(s))
    return plots or ["<p>Nothing to plot.</p>"]


def _trace_plot(s: Situation) -> str:
    timeline = s.timeline
    assert timeline is not None
    ranks = [timeline.ranks[stage] for stage in range(timeline.num_stages)]
    origin = min(rank.base_us for rank in ranks)
    rows = [[(b + rank.base_us - origin, e + rank.base_us - origin) for b, e in rank.blobs()] for rank in ranks]
    begin = min(row[0][0] for row in rows)
    end = begin + _TRACE_SHOWN * timeline.period_us
    scaled = [[(b / 1000, e / 1000) for b, e in row if b < end] for row in rows]
    return svg.timeline("Computing, by stage (traces)", scaled, begin / 1000, end / 1000, "ms")


def _facts(title: str, facts: list[dict[str, Any]], tag: str = "h2") -> str:
    if not facts:
        return ""
    items = []
    for fact in facts:
        where = "" if fact["file"] is None else f"{fact['file']}:{fact['line']}" if fact["line"] else fact["file"]
        items.append(f"<li>{escape(fact['text'])} <span class='w'>{escape(where)}</span></li>")
    return f"<{tag}>{title}</{tag}><ul>{''.join(items)}</ul>"


def _missing(missing: list[dict[str, str]]) -> str:
    if not missing:
        return ""
    items = "".join(f"<li>{escape(item['what'])}<br><code>{escape(item['how'])}</code></li>" for item in missing)
    return f"<h2>Missing: run this, send that</h2><ul>{items}</ul>"


def _files(answer: dict[str, Any]) -> str:
    items = []
    for file in answer["recognised"]:
        used = "" if file["used"] else "<b>not used</b>: "
        items.append(
            f"<li>{escape(file['file'])}: {used}{escape(file['kind'])} <span "
            f"class='w'>{escape(file['remark'])}</span></li>"
        )
    items += [f"<li>{escape(problem)}</li>" for problem in answer["problems"]]
    return f"<h2>What was read</h2><ul>{''.join(items)}</ul>"
