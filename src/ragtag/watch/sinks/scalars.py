"""Which numbers of an event go into tools that draw curves over steps, and what they are called there.

The one idea: every such tool gets the same names, so that a dashboard can be carried over.
"""

from collections.abc import Iterator

from ragtag.watch.events import AnyEvent, Evaluated, Members, Step, Verdict, Vitals


class Scalars:
    """Names the devices of the newest membership."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()

    def of(self, event: AnyEvent) -> Iterator[tuple[str, int, float]]:
        """Yield (name, step, value) for each number of `event` that is one over steps."""
        if isinstance(event, Members):
            self._names = tuple(member.name for member in event.ranks)
        elif isinstance(event, Step):
            yield from self._of_step(event)
        elif isinstance(event, Vitals):
            yield from self._by_device("memory_bytes", event.step, event.memory_bytes)
            yield from self._by_device("temperature_c", event.step, event.temperature_c)
        elif isinstance(event, Verdict):
            for worth in event.devices:
                yield f"device/{worth.name}/adds", event.step, worth.gain
        elif isinstance(event, Evaluated):
            if event.value is not None:
                yield "evaluation", event.step, event.value
            for name, value in event.metrics.items():
                if value is not None:
                    yield f"evaluation/{name}", event.step, value

    def _of_step(self, step: Step) -> Iterator[tuple[str, int, float]]:
        number = step.number
        for name, value in (("loss", step.loss), ("lr", step.lr), ("grad_norm", step.grad_norm), *step.metrics.items()):
            if value is not None:
                yield name, number, value
        yield "step_s", number, step.wall_s
        if step.wall_s:
            yield "samples_per_s", number, step.samples / step.wall_s
        for name, value in (("eta", step.eta), ("predicted_step_s", step.predicted_s)):
            if value:
                yield name, number, value
        yield from self._by_device("share", number, step.shares)
        for name in ("compute_s", "data_s", "wait_s", "apply_s"):
            yield from self._by_device(name, number, getattr(step, name))
        yield "comm_s", number, step.comm_s

    def _by_device(self, what: str, step: int, values: tuple[float, ...]) -> Iterator[tuple[str, int, float]]:
        for name, value in zip(self._names, values):
            yield f"device/{name}/{what}", step, value
