"""Small programs as JAX users write them: functions over pytrees, Flax NNX and Equinox modules, every kind of op.

Each is a `Case`: parameters, a batch, a forward pass and a loss; `train_program` and `infer_program` make steps of it.
Modes are `train` (SGD with momentum), `adamw` and `infer`.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from autoshard.program import Program, trace


Tree = Any
S = jax.ShapeDtypeStruct


def f32(*shape: int) -> Any:
    return S(shape, jnp.float32)


def ids(*shape: int) -> Any:
    return S(shape, jnp.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model by its parts."""

    params: Tree
    batch: Tree
    forward: Callable[[Tree, Tree], Any]
    loss: Callable[[Tree, Tree], Any]
    limits: dict[str, int] = dataclasses.field(default_factory=dict)


def optimizer_of(mode: str) -> Any:
    # Momentum, so that one step also returns the gradients, as its state.
    return optax.adamw(1e-3) if mode == "adamw" else optax.sgd(0.1, momentum=0.9)


def train_program(name: str, case: Case, mode: str) -> Program:
    """Loss, gradients and the optimizer's update, parameters and state donated."""
    tx = optimizer_of(mode)

    def step(params: Tree, opt_state: Tree, batch: Tree) -> Any:
        value, grads = jax.value_and_grad(case.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    def make_args(seed: int) -> tuple[Any, ...]:
        params, batch = _values(case, seed)
        return params, tx.init(params), batch

    args = (case.params, jax.eval_shape(tx.init, case.params), case.batch)
    return trace(step, args, name=name, donate_argnums=(0, 1), training=True, make_args=make_args)


def infer_program(name: str, case: Case) -> Program:
    args = (case.params, case.batch)
    return trace(
        lambda params, batch: case.forward(params, batch), args, name=name, make_args=lambda s: _values(case, s)
    )


def _values(case: Case, seed: int) -> tuple[Any, Any]:
    return values(case.params, case.batch, case.limits, seed)


def values(params: Tree, batch: Tree, limits: dict[str, int], seed: int) -> tuple[Any, Any]:
    """Small normal numbers, and integers below the limit of the part of the batch that they are in, else below 64."""
    key = jax.random.key(seed)

    def fill(path: Any, leaf: Any) -> Any:
        text = jax.tree_util.keystr(path)
        own = jax.random.fold_in(key, zlib.crc32(text.encode()) % 2**31)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            limit = next((n for part, n in limits.items() if f"'{part}'" in text), 64)
            return jax.random.randint(own, leaf.shape, 0, limit, leaf.dtype)
        return 0.05 * jax.random.normal(own, leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, (params, batch))


def layers(sizes: list[int]) -> Tree:
    return [{"w": f32(a, b), "b": f32(b)} for a, b in zip(sizes, sizes[1:], strict=False)]


def dense(params: Tree, x: Any, last: Callable[[Any], Any] = jnp.tanh) -> Any:
    for number, layer in enumerate(params):
        x = x @ layer["w"] + layer["b"]
        x = jnp.tanh(x) if number + 1 < len(params) else last(x)
    return x


def cross_entropy(logits: Any, labels: Any) -> Any:
    picked = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], logits, 0), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def squares(forward: Callable[[Tree, Tree], Any]) -> Callable[[Tree, Tree], Any]:
    return lambda params, batch: jnp.mean((forward(params, batch) - batch["y"]) ** 2)


def mlp() -> Case:
    """Four matmuls."""

    def forward(params: Tree, batch: Tree) -> Any:
        return dense(params, batch["x"])

    batch = {"x": f32(256, 256), "y": f32(256, 128)}
    return Case(layers([256, 512, 512, 512, 128]), batch, forward, squares(forward))


WIDTH, FFN, HEADS, GROUPS, HEAD, VOCAB, DEPTH, BATCH, SEQ = 128, 512, 4, 2, 32, 1024, 2, 16, 64


def _decoder_shapes() -> dict[str, tuple[int, ...]]:
    inner = GROUPS * HEADS * HEAD
    return {
        "q": (DEPTH, inner, WIDTH),
        "k": (DEPTH, HEADS * HEAD, WIDTH),
        "v": (DEPTH, HEADS * HEAD, WIDTH),
        "o": (DEPTH, WIDTH, inner),
        "up": (DEPTH, FFN, WIDTH),
        "down": (DEPTH, WIDTH, FFN),
        "norm1": (DEPTH, WIDTH),
        "norm2": (DEPTH, WIDTH),
    }


def norm(x: Any, w: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * (1.0 + w)


def decoder_layer(x: Any, w: Tree) -> Any:
    """Grouped-query attention and a feed-forward block; `x` [B, S, D]."""
    b, s, _ = x.shape
    h = norm(x, w["norm1"])
    q = jnp.einsum("bsd,fd->bsf", h, w["q"]).reshape(b, s, HEADS, GROUPS, HEAD)
    k = jnp.einsum("bsd,fd->bsf", h, w["k"]).reshape(b, s, HEADS, HEAD)
    v = jnp.einsum("bsd,fd->bsf", h, w["v"]).reshape(b, s, HEADS, HEAD)
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k) * HEAD**-0.5
    scores = jnp.where(jnp.arange(s)[:, None] >= jnp.arange(s), scores, -1e9)
    a = jnp.einsum("bkgst,btkh->bskgh", jax.nn.softmax(scores), v).reshape(b, s, -1)
    x = x + jnp.einsum("bsf,df->bsd", a, w["o"])
    h = norm(x, w["norm2"])
    return x + jnp.einsum("bsf,df->bsd", jax.nn.silu(jnp.einsum("bsd,fd->bsf", h, w["up"])), w["down"])


def decoder(scanned: bool, policy: Any = None) -> Case:
    """A decoder in plain JAX, rematerialised: its layers scanned, or one after the other with a policy."""

    def forward(params: Tree, batch: Tree) -> Any:
        x = jnp.take(params["embed"], batch["ids"], axis=0)
        layer = jax.checkpoint(decoder_layer, policy=policy)
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        else:
            for number in range(DEPTH):
                x = layer(x, {name: stack[number] for name, stack in params["layers"].items()})
        return jnp.einsum("bsd,vd->bsv", x, params["head"])

    params = {
        "embed": f32(VOCAB, WIDTH),
        "layers": {name: f32(*shape) for name, shape in _decoder_shapes().items()},
        "head": f32(VOCAB, WIDTH),
    }
    batch = {"ids": ids(BATCH, SEQ), "labels": ids(BATCH, SEQ)}
    return Case(params, batch, forward, lambda p, b: cross_entropy(forward(p, b), b["labels"]))


def state_space() -> Case:
    """A diagonal state space model: gated linear recurrences by `associative_scan` over the sequence."""
    width, inner = 128, 256

    def forward(params: Tree, batch: Tree) -> Any:
        x = batch["x"]
        for layer in params["layers"]:
            h = norm(x, layer["norm"])
            decay = jax.nn.sigmoid(h @ layer["decay"] + 2.0)
            value = h @ layer["value"]
            _, state = jax.lax.associative_scan(
                lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, (1 - decay) * value), axis=1
            )
            x = x + (state * jax.nn.silu(h @ layer["gate"])) @ layer["out"]
        return x

    one = {"norm": f32(width), "out": f32(inner, width)} | {n: f32(width, inner) for n in ("decay", "value", "gate")}
    return Case({"layers": [one, one]}, {"x": f32(16, 64, width), "y": f32(16, 64, width)}, forward, squares(forward))


def graph_network() -> Case:
    """Messages along edges, summed at their targets by a scatter-add; one large graph."""
    nodes, edges, width = 512, 2048, 64

    def forward(params: Tree, batch: Tree) -> Any:
        h = dense(params["encode"], batch["nodes"])
        for block in params["blocks"]:
            both = jnp.concatenate([h[batch["source"]], h[batch["target"]]], axis=-1)
            messages = dense(block["edge"], both)
            received = jnp.zeros((nodes, width)).at[batch["target"]].add(messages)
            h = h + dense(block["node"], jnp.concatenate([h, received], axis=-1))
        return dense(params["decode"], h, lambda x: x)

    block = {"edge": layers([2 * width, 128, width]), "node": layers([2 * width, 128, width])}
    params = {"encode": layers([32, width]), "blocks": [block, block], "decode": layers([width, 16])}
    batch = {"nodes": f32(nodes, 32), "source": ids(edges), "target": ids(edges), "y": f32(nodes, 16)}
    return Case(params, batch, forward, squares(forward), {"source": nodes, "target": nodes})


def embedding_tables() -> Case:
    """A recommender: a table for each feature, their products, a dense tower."""
    tables, rows, width, batch = 6, 1024, 32, 256

    def forward(params: Tree, given: Tree) -> Any:
        bottom = dense(params["bottom"], given["dense"])
        looked = [jnp.take(table, given["ids"][:, i], axis=0) for i, table in enumerate(params["tables"])]
        parts = jnp.stack([bottom, *looked], axis=1)
        products = jnp.einsum("bid,bjd->bij", parts, parts).reshape(batch, -1)
        return dense(params["top"], jnp.concatenate([bottom, products], -1), lambda x: x)[:, 0]

    def loss(params: Tree, given: Tree) -> Any:
        logits = forward(params, given)
        return jnp.mean(jax.nn.softplus(logits) - given["clicked"] * logits)

    params = {
        "tables": [f32(rows, width)] * tables,
        "bottom": layers([16, 64, width]),
        "top": layers([width + (tables + 1) ** 2, 128, 1]),
    }
    given = {"dense": f32(batch, 16), "ids": ids(batch, tables), "clicked": f32(batch)}
    return Case(params, given, forward, loss, {"ids": rows})


def unet() -> Case:
    """A denoiser: convolutions down and up again, group norms, skip connections, an embedded time step."""
    widths = [16, 32, 64]

    def conv(x: Any, w: Any, stride: int = 1) -> Any:
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def group_norm(x: Any) -> Any:
        b, h, w, c = x.shape
        grouped = x.reshape(b, h, w, 8, c // 8)
        mean = grouped.mean((1, 2, 4), keepdims=True)
        spread = ((grouped - mean) ** 2).mean((1, 2, 4), keepdims=True)
        return ((grouped - mean) * jax.lax.rsqrt(spread + 1e-5)).reshape(b, h, w, c)

    def block(params: Tree, x: Any, time: Any) -> Any:
        h = conv(jax.nn.silu(group_norm(x)), params["one"]) + (time @ params["time"])[:, None, None]
        return x + conv(jax.nn.silu(group_norm(h)), params["two"])

    def forward(params: Tree, batch: Tree) -> Any:
        angle = batch["time"][:, None] * jnp.exp(-jnp.arange(16) / 4.0)
        time = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
        x, kept = conv(batch["noisy"], params["first"]), []
        for level in params["down"]:
            x = block(level["block"], x, time)
            kept.append(x)
            x = conv(x, level["conv"], stride=2)
        x = block(params["middle"], x, time)
        for level, skip in zip(params["up"], reversed(kept), strict=True):
            b, h, w, c = x.shape
            x = jnp.broadcast_to(x[:, :, None, :, None], (b, h, 2, w, 2, c)).reshape(b, 2 * h, 2 * w, c)
            x = block(level["block"], conv(jnp.concatenate([x, skip], -1), level["conv"]), time)
        return conv(x, params["last"])

    def shapes(width: int) -> Tree:
        return {"one": f32(3, 3, width, width), "two": f32(3, 3, width, width), "time": f32(32, width)}

    pairs = list(zip(widths, widths[1:], strict=False))
    params = {
        "first": f32(3, 3, 4, widths[0]),
        "down": [{"block": shapes(a), "conv": f32(3, 3, a, b)} for a, b in pairs],
        "middle": shapes(widths[-1]),
        "up": [{"block": shapes(a), "conv": f32(3, 3, b + a, a)} for a, b in reversed(pairs)],
        "last": f32(3, 3, widths[0], 4),
    }
    batch = {"noisy": f32(16, 16, 16, 4), "time": f32(16), "y": f32(16, 16, 16, 4)}
    return Case(params, batch, forward, squares(forward))


EXPERTS, EXPERT_FFN, TOKENS = 8, 128, 512


def _moe(expert_layer: Callable[[Tree, Any], Any]) -> Case:
    def forward(params: Tree, batch: Tree) -> Any:
        x = batch["x"]
        return x + expert_layer(params, norm(x, params["norm"]))

    params = {
        "norm": f32(WIDTH),
        "router": f32(WIDTH, EXPERTS),
        "up": f32(EXPERTS, WIDTH, EXPERT_FFN),
        "down": f32(EXPERTS, EXPERT_FFN, WIDTH),
    }
    return Case(params, {"x": f32(TOKENS, WIDTH), "y": f32(TOKENS, WIDTH)}, forward, squares(forward))


def moe_einsum() -> Case:
    """Experts by one-hot dispatch and einsums (Lepikhin et al. 2020, section 3.2)."""
    slots = 2 * TOKENS // EXPERTS

    def expert_layer(params: Tree, x: Any) -> Any:
        weights = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(jnp.argmax(weights, -1), EXPERTS)
        place = jnp.einsum("se,se->s", jnp.cumsum(chosen, axis=0) - chosen, chosen)
        dispatch = chosen[:, :, None] * jax.nn.one_hot(place.astype(jnp.int32), slots)[:, None]
        moved = jnp.einsum("sec,sd->ecd", dispatch, x)
        out = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", moved, params["up"])), params["down"])
        return jnp.einsum("sec,ecd->sd", dispatch * weights[:, :, None], out)

    return _moe(expert_layer)


def _sorted(params: Tree, x: Any) -> tuple[Any, Any, Any, Any]:
    """Tokens in the order of their experts: order, sorted experts, sorted tokens, weights of the choice."""
    weights = jax.nn.softmax(x @ params["router"])
    expert = jnp.argmax(weights, -1)
    order = jnp.argsort(expert, stable=True)
    return order, expert[order], x[order], jnp.max(weights, -1)


def moe_sort() -> Case:
    """Experts by sorting tokens into slots with a scatter, and back with a gather."""
    slots = 2 * TOKENS // EXPERTS

    def expert_layer(params: Tree, x: Any) -> Any:
        order, expert, moved, weight = _sorted(params, x)
        first = jnp.searchsorted(expert, jnp.arange(EXPERTS))
        slot = jnp.arange(TOKENS) - first[expert]
        held = jnp.zeros((EXPERTS, slots, WIDTH)).at[expert, slot].set(moved, mode="drop")
        out = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", held, params["up"])), params["down"])
        back = jnp.zeros_like(x).at[order].set(out.at[expert, slot].get(mode="fill", fill_value=0.0))
        return back * weight[:, None]

    return _moe(expert_layer)


def moe_ragged() -> Case:
    """Experts by sorting tokens and multiplying ragged groups."""

    def expert_layer(params: Tree, x: Any) -> Any:
        order, expert, moved, weight = _sorted(params, x)
        sizes = jnp.sum(expert[:, None] == jnp.arange(EXPERTS), axis=0, dtype=jnp.int32)
        h = jax.nn.gelu(jax.lax.ragged_dot(moved, params["up"], sizes))
        return jnp.zeros_like(x).at[order].set(jax.lax.ragged_dot(h, params["down"], sizes)) * weight[:, None]

    return _moe(expert_layer)


def decode_step(batch: int = 16, length: int = 128, heads: int = HEADS) -> Program:
    """One token for every sequence, with a key-value cache as donated state."""
    inner = GROUPS * heads * HEAD
    shapes = _decoder_shapes() | {
        "q": (DEPTH, inner, WIDTH),
        "k": (DEPTH, heads * HEAD, WIDTH),
        "v": (DEPTH, heads * HEAD, WIDTH),
        "o": (DEPTH, WIDTH, inner),
    }

    def step(params: Tree, cache: Tree, token: Any, position: Any) -> Any:
        x = jnp.take(params["embed"], token, axis=0)

        def layer(x: Any, both: Any) -> Any:
            w, held = both
            h = norm(x, w["norm1"])
            q = (h @ w["q"].T).reshape(batch, heads, GROUPS, HEAD)
            new = {part: (h @ w[part].T).reshape(batch, 1, heads, HEAD) for part in ("k", "v")}
            held = {p: jax.lax.dynamic_update_slice(held[p], new[p], (0, position, 0, 0)) for p in held}
            scores = jnp.einsum("bkgh,btkh->bkgt", q, held["k"]) * HEAD**-0.5
            scores = jnp.where(jnp.arange(length) <= position, scores, -1e9)
            a = jnp.einsum("bkgt,btkh->bkgh", jax.nn.softmax(scores), held["v"]).reshape(batch, -1)
            x = x + a @ w["o"].T
            return x + jax.nn.silu(norm(x, w["norm2"]) @ w["up"].T) @ w["down"].T, held

        x, cache = jax.lax.scan(layer, x, (params["layers"], cache))
        return x @ params["head"].T, cache

    params = {
        "embed": f32(VOCAB, WIDTH),
        "layers": {name: f32(*shape) for name, shape in shapes.items()},
        "head": f32(VOCAB, WIDTH),
    }
    cache = {part: f32(DEPTH, batch, length, heads, HEAD) for part in ("k", "v")}
    given = {"cache": cache, "token": ids(batch), "position": ids()}

    def make_args(seed: int) -> tuple[Any, ...]:
        made, data = values(params, given, {"position": length}, seed)
        return made, data["cache"], data["token"], data["position"]

    args = (params, cache, ids(batch), ids())
    return trace(step, args, name="decode step", donate_argnums=(1,), make_args=make_args)


def nnx_program(mode: str) -> Program:
    """A Flax NNX module with a batch norm, updated in place."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(64, 128, rngs=rngs)
            self.norm = nnx.BatchNorm(128, rngs=rngs)
            self.last = nnx.Linear(128, 32, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(nnx.relu(self.norm(self.first(x))))

    def make() -> Any:
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optimizer_of(mode), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, state: Any, batch: Tree) -> Any:
        value, grads = nnx.value_and_grad(lambda net: jnp.mean((net(batch["x"]) - batch["y"]) ** 2))(model)
        state.update(model, grads)
        return value

    model, state = nnx.eval_shape(make)
    batch = {"x": f32(128, 64), "y": f32(128, 32)}
    if mode == "infer":
        model.eval()
        return trace(nnx.jit(lambda model, x: model(x)), (model, batch["x"]), name="nnx module")
    return trace(step, (model, state, batch), name="nnx module", donate_argnums=(0, 1))


def equinox_program(mode: str) -> Program:
    """An Equinox module, its activation a static leaf."""
    import equinox as eqx

    tx = optimizer_of(mode)

    def make() -> Any:
        model = eqx.nn.MLP(64, 32, 128, 2, activation=jax.nn.gelu, key=jax.random.key(0))
        return model, tx.init(eqx.filter(model, eqx.is_inexact_array))

    model, state = eqx.filter_eval_shape(make)
    batch = {"x": f32(128, 64), "y": f32(128, 32)}

    def step(model: Any, opt_state: Any, batch: Tree) -> Any:
        def loss(net: Any) -> Any:
            return jnp.mean((jax.vmap(net)(batch["x"]) - batch["y"]) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, value

    if mode == "infer":
        return trace(lambda model, x: jax.vmap(model)(x), (model, batch["x"]), name="equinox module")
    return trace(step, (model, state, batch), name="equinox module", donate_argnums=(0, 1))


CASES: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "scanned decoder": lambda: decoder(scanned=True),
    "remat policy": lambda: decoder(False, jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "state space": state_space,
    "graph network": graph_network,
    "embedding tables": embedding_tables,
    "u-net": unet,
    "moe einsum": moe_einsum,
    "moe sort": moe_sort,
    "moe ragged": moe_ragged,
}
MODULES: dict[str, Callable[[str], Program]] = {"nnx module": nnx_program, "equinox module": equinox_program}
