"""The part of a report that is about islands: what each has given, how often they exchange, and what the guard saw.

The one idea: one table by island, then the reasons, newest first; where there are no islands, nothing at all.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_LONGEST = 400


def islands_html(shown: Mapping[str, Any] | None) -> str:
    """Return what `ragtag.watch.drawable` gave of islands, as HTML; empty: there are none."""
    if shown is None:
        return ""
    return f"""<h2>Islands</h2>
<p>{escape(_tempo(shown))}</p>
{_table(shown["islands"])}
{_actions(shown["actions"])}
<h3>What became of them</h3>
{_words(shown["words"])}"""


def _tempo(shown: Mapping[str, Any]) -> str:
    rounds, tempo = shown["rounds"], shown["tempo"]
    merged = f"{shown['num_merges']:,} merges of {shown['num_fragments']} fragments ({rounds:.1f} rounds)"
    if tempo is None:
        return f"{merged}."
    how = "waiting for each other" if tempo["blocking"] else "while they go on"
    return f"{merged}, every {tempo['inner_steps']} steps, {how}, as {tempo['codec']}: {tempo['reason']}."


def _table(islands: Sequence[Mapping[str, Any]]) -> str:
    heads = (
        "island",
        "state",
        "contributions",
        "sent",
        "less than fp32",
        "late, mean rounds",
        "weight, mean",
        "refused",
        "loss before and after an arrival",
    )
    rows = []
    for each in islands:
        guard = each["guard"]
        reading = (
            "" if guard is None else f"{_loss(guard['before'])} → {_loss(guard['after'])} ± {_loss(guard['noise'])}"
        )
        cells = (
            f"<b>{escape(each['name'])}</b>",
            escape(each["state"]),
            f"{each['contributions']:,}",
            f"{each['sent_bytes'] / 1e6:,.1f} MB",
            f"{each['compression']:.1f} times" if each["compression"] else "",
            f"{each['staleness']:.2f}",
            f"{each['weight']:.2f}",
            f"{each['refused']:,}",
            reading,
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _loss(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"


def _actions(actions: Sequence[Mapping[str, Any]]) -> str:
    if not actions:
        return '<p class="quiet">The guard had nothing to do: no merge raised the loss beyond noise.</p>'
    return "".join(f'<p class="finding">{escape(each["action"][:_LONGEST])}</p>' for each in actions)


def _words(words: Sequence[Mapping[str, Any]]) -> str:
    return "".join(
        f"<p><b>{escape(each['island'])}</b> {escape(each['change'])}: {escape(each['text'][:_LONGEST])}</p>"
        for each in words
    )
