import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.values import Batch, DocumentError, Plan, Stage, StepReport, from_json, to_json

counts = st.integers(0, 2**40)
texts = st.text(st.characters(codec="utf-8"))
plans = st.builds(
    Plan,
    shares=st.lists(counts, max_size=5).map(tuple),
    micro_batch=st.lists(counts, max_size=5).map(tuple),
    unit=counts,
    chunk_weights=st.lists(counts, max_size=5).map(tuple),
    reason=texts,
    epoch=counts,
)
seconds = st.lists(st.floats(allow_nan=False), max_size=4).map(tuple)
reports = st.builds(
    StepReport,
    number=counts,
    loss=st.floats(allow_nan=False),
    metrics=st.dictionaries(texts, st.floats(allow_nan=False), max_size=3),
    grad_norm=st.none() | st.floats(allow_nan=False),
    lr=st.floats(allow_nan=False),
    samples=counts,
    weight=st.floats(allow_nan=False),
    skipped=texts | st.just("nan"),
    wall_s=st.floats(allow_nan=False),
    shares=st.lists(counts, max_size=4).map(tuple),
    compute_s=seconds,
    wait_s=seconds,
    comm_s=st.floats(allow_nan=False),
    plan_id=texts,
    generation=counts,
)
PLAN = Plan(shares=(8, 5, 3), micro_batch=(8, 5, 3), unit=1, chunk_weights=(1, 1, 1), reason="pinned: 8, 5, 3")
REPORT = StepReport(
    number=1,
    loss=0.5,
    lr=0.1,
    samples=16,
    weight=16.0,
    wall_s=0.01,
    shares=(8, 8),
    compute_s=(0.1, 0.2),
    wait_s=(0.1, 0.0),
    comm_s=0.0,
    plan_id=PLAN.id,
)


@given(plans | reports | st.builds(Batch, step=counts, epoch=counts, first=counts, size=counts))
def test_round_trip(value):
    data = to_json(value)
    assert b"\n" not in data
    assert from_json(type(value), data) == value


def test_nan_survives():
    report = msgspec.structs.replace(REPORT, loss=math.nan, grad_norm=math.nan, metrics={"accuracy": math.nan})
    again = from_json(StepReport, to_json(report))
    assert math.isnan(again.loss)
    assert again.grad_norm is not None
    assert math.isnan(again.grad_norm)
    assert math.isnan(again.metrics["accuracy"])


@given(plans, plans)
def test_plan_ids_are_equal_exactly_when_plans_are(one, other):
    assert (one.id == other.id) == (one == other)
    assert len(one.id) == 12
    assert int(one.id, 16) >= 0


def test_plan_id_is_pinned_and_depends_on_every_field():
    assert PLAN.id == "f10dd308e1ea"
    changes = {
        "shares": (8, 4, 4),
        "micro_batch": (4, 5, 3),
        "unit": 2,
        "chunk_weights": (1, 1, 2),
        "reason": "measured",
        "layout": "zero3",
        "slices": (5, 3, 1),
        "stages": ((Stage(rank=0, first=0, stop=3),),),
        "pulled": (2, 1, 1),
        "epoch": 1,
    }
    assert set(changes) == set(Plan.__struct_fields__)
    ids = {msgspec.structs.replace(PLAN, **{name: value}).id for name, value in changes.items()}
    assert len(ids | {PLAN.id}) == len(changes) + 1


@given(st.data())
def test_a_damaged_document_is_refused(data):
    document = to_json(PLAN)
    place = data.draw(st.integers(0, len(document) - 1))
    if data.draw(st.booleans()):
        damaged = document[:place]
    else:
        damaged = document[:place] + bytes([document[place] ^ data.draw(st.integers(1, 255))]) + document[place + 1 :]
    with pytest.raises(DocumentError, match=r"document|schema"):
        from_json(Plan, damaged)


def test_another_schema_is_named():
    with pytest.raises(DocumentError, match="schema 2; this ragtag reads schema 1"):
        from_json(Plan, to_json(PLAN).replace(b'"schema":1', b'"schema":2'))


def test_another_kind_is_named():
    with pytest.raises(DocumentError, match="Expected a StepReport document, found a Plan"):
        from_json(StepReport, to_json(PLAN))


def test_values_are_frozen():
    with pytest.raises(AttributeError):
        PLAN.unit = 2  # pyright: ignore[reportAttributeAccessIssue]
