"""What the controller decided, why, what it promised and what came of it.

The one idea: a prediction is written down when the decision is made and the achieved number is put beside it later,
so that every automatic choice can be checked by whoever reads the report.
"""

import msgspec

from ragtag.core.values import Plan


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One change of plan, in force from step `step` + 1."""

    step: int
    """The last step that ran under the plan before."""
    kind: str
    """"shares": work moves between ranks that have some; "park": a rank loses all; "unpark": one gets work again;
    "try": a parked rank gets one unit, to see how fast it is now; "chunks": ranks own other parts of the gradient;
    "memory": a rank ran out of it, and computes less at a time from now on, or nothing."""
    reason: str
    """One line a person understands, with numbers."""
    plan: Plan
    predicted_gain: float
    """Fraction of the step time that is saved; negative for a try, which costs a little."""
    predicted_step_s: float
    """Predicted median seconds of a step under `plan`; 0: nothing is known to predict it from."""
    achieved_step_s: float | None = None
    """Median seconds of the first steps under `plan`; None: none has run yet."""
    achieved_over: int = 0
    """How many steps that median is taken over."""

    def outcome(self) -> str:
        """Prediction and achievement in words: "predicted 0.312 s, achieved 0.318 s"."""
        if not self.predicted_step_s:
            return "nothing predicted"
        predicted = f"predicted {self.predicted_step_s:.3g} s"
        if self.achieved_step_s is None:
            return f"{predicted}, not measured yet"
        return f"{predicted}, achieved {self.achieved_step_s:.3g} s"
