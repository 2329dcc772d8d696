"""Ratios of two sides within each round, with their targets, and rows of tables."""

import dataclasses
import statistics


@dataclasses.dataclass
class Ratio:
    """The time of one side by that of another, and its target, if there is one."""

    over: str
    under: str
    at_most: float = None
    at_least: float = None


def ratio_of(ratio, figures):
    """Returns the JSON's fields. `figures`: name of a side -> the figures of each
    round."""
    # Divides within each round: what slows a machine for a while slows both
    # sides.
    by_round = [a["median_ms"] / b["median_ms"] for a, b in
                zip(figures[ratio.over], figures[ratio.under])]
    value = statistics.median(by_round)
    result = {"over": ratio.over, "under": ratio.under,
              "value": round(value, 3), "min": round(min(by_round), 3),
              "max": round(max(by_round), 3)}
    if ratio.at_least is not None:
        result |= {"target": {"at_least": ratio.at_least},
                   "target_met": value >= ratio.at_least}
    elif ratio.at_most is not None:
        result |= {"target": {"at_most": ratio.at_most},
                   "target_met": value <= ratio.at_most}
    return result


def shown(ratio):
    text = f"{ratio['value']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"
    return text + met(ratio["target_met"]) if "target" in ratio else text


def met(is_met):
    return " met" if is_met else " MISSED"


def goal(target):
    """Returns the words of a target; of None, an empty text."""
    if target is None:
        return ""
    return (f">= {target['at_least']:g}" if "at_least" in target
            else f"<= {target['at_most']:g}")


def row(cells):
    return "| " + " | ".join(cells) + " |"


def rule(columns):
    return "| --- |" + " ---: |" * columns
