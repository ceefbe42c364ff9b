"""Experts by einsum and by sorting: values compared with a plain mixture, dropped tokens, and messages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.errors import UserError
from autoshard.planning import source_choices
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.program import from_torch, open_source, parse_experts, trace
from autoshard.program.kernels.ragged_dots import grouped_matmul
from autoshard.program.moe.experts import LOSSLESS, capacity, mix


BATCH, DIM, INNER, EXPERTS = 6, 8, 5, 4


def arguments() -> tuple[Any, ...]:
    """Return tokens [6, 1, 8], weights and mask [6, 1, 4] of two experts each, and the experts' weights."""
    random = np.random.default_rng(0)
    x, gate_up, down = (
        jnp.asarray(random.standard_normal(shape), jnp.float32)
        for shape in ((BATCH, 1, DIM), (EXPERTS, 2 * INNER, DIM), (EXPERTS, DIM, INNER))
    )
    scores = random.random((BATCH, 1, EXPERTS))
    mask = scores >= np.sort(scores, -1)[..., -2:-1]
    return x, jnp.asarray(scores * mask, jnp.float32), jnp.asarray(mask), gate_up, down


def experts(*values: Any) -> Any:
    return mix(*values, jax.nn.silu, EXPERTS)  # as many slots as tokens, so none is dropped


def plain(x: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    gate, up = (jnp.einsum("bsd,eid->bsei", x, half) for half in jnp.split(gate_up, 2, axis=1))
    return jnp.einsum("bse,bsei,edi->bsd", weights, jax.nn.silu(gate) * up, down)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", [form for form in LOSSLESS if form != "ragged:8"])  # there are four experts
def test_forms_that_drop_no_token_compute_the_same(form: str) -> None:
    x, weights, mask, gate_up, down = arguments()

    def mixed(x: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        with capacity(None, notes, parse_experts(form)):
            return mix(x, weights, mask, gate_up, down, jax.nn.silu, 2)

    def total(made: Any) -> Any:
        return jax.value_and_grad(lambda *given: (made(*given) * jnp.cos(jnp.arange(float(DIM)))).sum(), (0, 1, 2, 3))

    notes: list[str] = []
    for turn in (lambda value: value, lambda value: jnp.swapaxes(value, 0, 1)):  # during decoding, and along a sequence
        mask = turn(arguments()[2])
        given = (turn(x), turn(weights), gate_up, down)
        (value, grads), (wanted, theirs) = jax.jit(total(mixed))(*given), total(plain)(*given)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        theirs = (theirs[0], theirs[1] * mask, *theirs[2:])  # a weight counts only if its expert is chosen
        for mine, other in zip((grads[0], grads[1] * mask, *grads[2:]), theirs, strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5 * np.abs(other).max())
    padded = "Rows of experts are sent padded: the batch of 1 is no multiple of the 4 groups."
    assert (padded in notes) == (form == "ragged:4")
    assert all(note.endswith("(no token is ever dropped).") for note in notes if note != padded) and notes


def test_rows_beyond_those_of_a_group_are_dropped_and_reported() -> None:
    x = jnp.broadcast_to(arguments()[0][:1], (1, 8, DIM))  # the same token eight times, which chooses experts 0 and 2
    mask = jnp.zeros((1, 8, EXPERTS), bool).at[..., jnp.array([0, 2])].set(True)
    weights, (_, _, _, gate_up, down) = mask / 2, arguments()
    with capacity(0.5, notes := [], parse_experts("sorted:2")):
        found = mix(x, weights, mask, gate_up, down, jax.nn.silu, 2)
    assert notes == [
        "Experts get the tokens of each sequence sorted, in 2 groups of experts with 4 rows each; "
        "tokens beyond the rows are dropped."
    ]
    np.testing.assert_allclose(found[:, :4], plain(x, weights, gate_up, down)[:, :4], rtol=1e-5, atol=1e-6)
    assert not found[:, 4:].any()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"experts": "some"}, "experts `some` is not known; use slots, slots:all"),
        ({"experts": "sorted:0"}, "experts `sorted:0` is not known"),
        ({"experts": "sorted:3"}, "experts `sorted:3` cannot be: 4 experts do not divide into 3 groups."),
        ({"experts": "ragged:8"}, "experts `ragged:8` cannot be: 4 experts do not divide into 8 groups."),
        ({"imbalance": 1.2}, "--imbalance is for experts in groups, such as sorted:8: `slots` takes the same"),
        ({"experts": "sorted:2", "imbalance": 0.5}, "--imbalance is 0.5, but the busiest device has no less"),
        ({"experts": "sorted", "capacity_factor": 2.0}, "but experts `sorted` drop no token; use slots, sorted:8"),
    ],
)
def test_bad_forms_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_source("hf:mixtral-tiny", batch=2, seq=16, **options)


def test_a_form_is_read_from_its_text() -> None:
    for text in ("slots", "slots:all", "sorted", "sorted:8", "ragged:8"):
        form = parse_experts(text)
        assert parse_experts(form.text) == form


def test_the_busiest_device_takes_longer_where_groups_are_split() -> None:
    topology, times = Topology.parse("v5e:2x2"), []
    for busiest in (1.0, 1.5):
        # rows, weights, and the number of rows of each expert
        shapes = [(2, 4, 2048, 2048), (8, 2048, 2048), (2, 4, 4)]
        dtypes = ("bfloat16", "bfloat16", "int32")
        given = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
        program = trace(lambda *args, busiest=busiest: grouped_matmul(*args, 8192, busiest), given, name="grouped")
        model = build_model(
            program, analyse_program(program, "tpu"), make_mesh(topology, {"data": 2, "model": 2}), 1 << 40
        )
        (node,) = (n for n in model.nodes if n.kind == "op" and model.graph.ops[n.ref].opaque is not None)
        times.append(next(iter(node.time.values())))
    split = (node.states == 0).any(axis=1)
    np.testing.assert_allclose(times[1][split] / times[0][split], 1.5, rtol=0.05)
    assert split.any() and (times[1][~split] == times[0][~split]).all()


def test_imbalance_is_reported() -> None:
    options = {"batch": 2, "seq": 16, "imbalance": 1.5}
    said = [open_source("hf:mixtral-tiny", experts=f"sorted:{n}", **options).notes[1:] for n in (2, 4)]
    assert said[0][0].startswith("The busiest device is assumed to have 1.5 times the mean number of tokens")
    assert not said[1], "with an expert in each group all rows are multiplied"


def test_a_module_without_experts_takes_no_form_of_them() -> None:
    import torch

    with pytest.raises(UserError, match="--experts is for mixtures of experts; `Linear` has none, so leave it out"):
        from_torch(torch.nn.Linear(2, 2), torch.empty(2, 2), experts="sorted")


def test_the_planner_chooses_among_forms_that_drop_no_token() -> None:
    assert source_choices({"experts": "auto"}, "v5e:2x4") == {"experts": LOSSLESS}
    assert source_choices({"experts": "slots"}, "v5e:2x4") == {}
    with pytest.raises(UserError, match="--experts auto chooses among forms that drop no token"):
        source_choices({"experts": "auto", "capacity_factor": 1.5}, "v5e:2x4")


def test_a_token_of_each_sequence_gets_what_its_experts_make_of_it() -> None:
    x, weights, mask, gate_up, down = arguments()
    expected = plain(x, weights, gate_up, down)
    np.testing.assert_allclose(experts(x, weights, mask, gate_up, down), expected, rtol=1e-5, atol=1e-5)
    along = experts(*(jnp.swapaxes(value, 0, 1) for value in (x, weights, mask)), gate_up, down)
    np.testing.assert_allclose(jnp.swapaxes(along, 0, 1), expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_sliced_of_weights_where_one_token_is_decoded() -> None:
    program = jax.make_jaxpr(experts)(*arguments())
    weight = program.jaxpr.invars[3]
    assert [eqn.primitive.name for eqn in program.jaxpr.eqns if weight in eqn.invars] == ["dot_general"]
