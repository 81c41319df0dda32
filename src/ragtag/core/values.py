"""The frozen records that pass between rooms, and their JSON form.

The one idea: a document carries its schema version, its kind and a hash of its content, so that ranks can compare
plans by twelve characters and a damaged or foreign document is refused by name instead of half understood.
"""

import math
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from ragtag.core.errors import RagtagError

SCHEMA = 1
"""Version of the JSON documents that `to_json` writes; `from_json` reads this one only."""

V = TypeVar("V", bound=msgspec.Struct)


class DocumentError(RagtagError, ValueError):
    """A JSON document is damaged, of another kind, or written by another version of ragtag."""


Layout: TypeAlias = Literal["replicated", "zero1", "zero2", "zero3", "pipeline"]
"""Nothing is cut; optimizer state, gradients too, or parameters too, into slices (Rajbhandari et al. 2020, "ZeRO"); or
the model itself, into stages (Narayanan et al. 2019, "PipeDream")."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds and computes of the model in a pipeline."""

    rank: int
    first: int
    """Its first block."""
    stop: int
    """The block after its last; what runs before the first block, or after the last one, goes with that."""


Stages: TypeAlias = tuple[tuple[Stage, ...], ...]
"""The stages of each pipeline, in the order in which samples pass them; every pipeline holds the whole model."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One step's global batch: positions `first` to `first + size` - 1 of `epoch`, in samples."""

    step: int
    epoch: int
    first: int
    size: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a step's work is shared out; tuples are by rank."""

    shares: tuple[int, ...]
    """Samples of a full global batch; their sum is the global batch size."""
    micro_batch: tuple[int, ...]
    """Largest number of samples in one forward."""
    unit: int
    """Positions of the global batch that are always computed together, in samples."""
    chunk_weights: tuple[int, ...]
    """Relative size of the part of the gradient that each rank owns while it is being added up."""
    reason: str
    """One line that says why this plan was chosen."""
    layout: Layout = "replicated"
    """Which of the model's state is cut into slices, one a rank."""
    slices: tuple[int, ...] = ()
    """Relative sizes of these slices; empty: nothing is cut."""
    stages: Stages = ()
    """Of layout "pipeline"; the samples of a pipeline are the share of its last stage's rank. Empty: no pipelines."""
    pulled: tuple[int, ...] = ()
    """How many of its last units of a full batch each rank lets others pull; empty: none."""
    epoch: int = 0
    """Counts the plans of a run; ranks switch at a step boundary only."""

    @property
    def id(self) -> str:
        """Content hash: 12 hex characters of the canonical JSON, equal on two ranks iff the plans are equal."""
        return _content_id(_encode(self))


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did. `loss` and `metrics` are global weighted means, equal on every rank; tuples are by rank."""

    number: int
    """Counts from 1."""
    loss: float
    metrics: Mapping[str, float] = {}
    grad_norm: float | None = None
    """Norm of the whole gradient before clipping; None where it was not computed."""
    lr: float
    """Learning rate of the first parameter group, as this step used it."""
    samples: int
    weight: float
    """What the loss was divided by: samples or tokens."""
    skipped: str = ""
    """Why the parameters were not updated; empty: they were."""
    wall_s: float
    predicted_s: float = 0.0
    """What the cost model said before this step that a step of this plan takes; 0: speeds were not known."""
    shares: tuple[int, ...]
    """Samples that each rank's sum held."""
    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    comm_s: float
    sent_bytes: tuple[int, ...] = ()
    """Gradients, parameters and activations that each rank has handed to its links since the step before; votes and
    checkpoints are not in it, nor sums inside an accelerator's own library."""
    plan_id: str
    generation: int = 0
    """Counts the memberships of a run."""


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    kind: str
    id: str
    value: msgspec.Raw


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    kind: str


def to_json(value: msgspec.Struct) -> bytes:
    """Return `value` as one line of JSON with schema version, kind and content hash.

    JSON has no word for nan and infinities: they are written as strings and read back as numbers.
    """
    content = _encode(value)
    document = _Document(schema=SCHEMA, kind=type(value).__name__, id=_content_id(content), value=msgspec.Raw(content))
    return msgspec.json.encode(document)


def from_json(cls: type[V], data: bytes) -> V:
    """Return the `cls` that `to_json` wrote into `data`.

    Raises:
        DocumentError: `data` is no such document: damaged, another kind, or another schema version.
    """
    wanted = cls.__name__
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.schema != SCHEMA:
            raise DocumentError(
                f"This {header.kind} has schema {header.schema}; this ragtag reads schema {SCHEMA}. "
                f"Use the ragtag that wrote it, on every machine: pip show ragtag."
            )
        if header.kind != wanted:
            raise DocumentError(f"Expected a {wanted} document, found a {header.kind}.")
        document = msgspec.json.decode(data, type=_Document)
        content = bytes(document.value)
        if _content_id(content) != document.id:
            raise DocumentError(
                f"A {wanted} document is damaged: its content has hash {_content_id(content)}, "
                f"but it was written with {document.id}. Write it again."
            )
        # Not strict, only so that "nan" becomes a number again; the hash already says we wrote these very bytes.
        return msgspec.convert(msgspec.json.decode(content), cls, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DocumentError(f"A {wanted} document of {len(data)} bytes is damaged or incomplete: {error}.") from error


def _encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(_spell_non_finite(msgspec.to_builtins(value)), order="sorted")


def _spell_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _spell_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spell_non_finite(item) for item in value]
    return value


def _content_id(content: bytes) -> str:
    return blake2b(content, digest_size=6).hexdigest()
