"""The move of new weights from a trainer to a sampler: every weight with its devices before and after."""

from collections.abc import Iterator

from autoshard.cost import Topology
from autoshard.planning import PlacedMesh, PlacedReshard, ReshardedTensor, Spec, predict_placed_reshard
from autoshard.program import WeightDim, decoder_weights, weight_shapes
from autoshard.reinforcement.chip_shares import ChipPart
from autoshard.reinforcement.rl_workload import RlModel
from autoshard.reinforcement.sampler import Sampler
from autoshard.reinforcement.trainer import Trainer, TrainerStage
from autoshard.serving import STORED_BYTES, serving_specs


def predict_move(
    model: RlModel, topology: Topology, ends: tuple[Trainer, Sampler], parts: tuple[ChipPart, ChipPart], dtype: str
) -> PlacedReshard:
    """Return bytes and least seconds of the move of all weights, cast to the sampler's dtype before they are sent.

    - `topology`: all devices.
    - `ends`: the trainer and the sampler.
    - `parts`: the devices of both, which may be the same.
    - `dtype`: that of the sampler's weights, a key of `STORED_BYTES`.
    """
    return predict_placed_reshard(_moved(model, *ends, parts, STORED_BYTES[dtype]), topology)


def _moved(
    model: RlModel, trainer: Trainer, sampler: Sampler, parts: tuple[ChipPart, ChipPart], itemsize: float
) -> Iterator[ReshardedTensor]:
    """Yield every weight, once for all layers of a stage."""
    specs = serving_specs(model.config, model.decoder, sampler.engine, sampler.engines, counted=True)
    after = PlacedMesh(dict(specs.sizes), parts[1].devices)
    kinds = decoder_weights(model.fields, model.decoder)
    for name, (shape, copies) in weight_shapes(model.fields, model.decoder).items():
        # Embedding and head are stored in at least two bytes.
        bits = int(8 * (max(2.0, itemsize) if WeightDim.VOCABULARY in kinds[name] else itemsize))
        for stage in trainer.stages:
            count = _copies(name, copies, stage, model.decoder.layers)
            own = stage.experts if stage.experts and WeightDim.EXPERT in kinds[name] else stage
            if count:
                before = own.placed(parts[0]), own.spec(kinds[name])
                yield ReshardedTensor(shape, bits, count, before, (after, Spec(specs.weights[name])))


def _copies(name: str, copies: int, stage: TrainerStage, layers: int) -> int:
    """Return the number of a weight's copies on a stage, of `copies` in all `layers`."""
    if "*" not in name:
        first = name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight"))
        return int(stage.embedding if first else stage.head)
    return round(copies * stage.layers / layers)
