"""Modules of torch's code bases as training steps, at a well-known size and small, for `code_bases.py`.

`PROGRAMS` has one entry for each. Full-size modules are on the meta device. Small ones are real: layers, widths and
inputs are smaller, but the computation is the same.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A module, its inputs, and the parts of its step."""

    module: Any
    inputs: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    targets: Any = None
    loss: Callable[..., Any] | None = None
    limits: dict[str, int] = dataclasses.field(default_factory=dict)
    """Upper bound of values, by the start of the name of a batch leaf of integers."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """More options of `from_torch`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One row: a maker of the full (True) or small (False) case, and the full case's topology and recipe."""

    library: str
    make: Callable[[bool], Case]
    topology: str = "v5p:2x2x2"
    remat: str = "none"
    optimizer: str = "adamw"


def library(name: str) -> Any:
    """Import a module of a package that only this script needs."""
    return importlib.import_module(name)


def of(full: bool, case: Callable[[], Case]) -> Case:
    """Call `case`, with its tensors on the meta device if it is the full one."""
    import torch

    torch.manual_seed(0)
    with torch.device("meta" if full else "cpu"):
        return case()


def first_of(output: Any) -> Any:
    """Return the logits of an output that may have further values."""
    import torch

    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict):
        return next(iter(output.values()))
    return first_of(output[0])


def labelled(output: Any, targets: Any) -> Any:
    """Return the cross entropy of logits [..., classes]."""
    from torch.nn import functional

    logits = first_of(output)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def pixelwise(output: Any, targets: Any) -> Any:
    """Return the cross entropy of logits [B, classes, H, W]."""
    from torch.nn import functional

    return functional.cross_entropy(first_of(output), targets)


def squared(output: Any, targets: Any) -> Any:
    """Return the mean squared error of the first output."""
    return (first_of(output).float() - targets.float()).square().mean()


def images(make: Callable[[], Any], batch: int, pixels: int, classes: int = 1000) -> Case:
    """Make a classifier of images [B, 3, pixels, pixels]."""
    import torch

    targets = torch.zeros(batch, dtype=torch.int64)
    limits = {"targets": classes}
    return Case(make(), (torch.zeros(batch, 3, pixels, pixels),), targets=targets, loss=labelled, limits=limits)


def tokens(module: Any, batch: int, length: int, vocabulary: int, **options: Any) -> Case:
    """Make a language model on ids [B, S]."""
    import torch

    ids = torch.zeros(batch, length, dtype=torch.int64)
    limits = {"": vocabulary}
    return Case(module, (ids,), targets=ids.clone(), loss=labelled, limits=limits, options=options)


# --- torchvision ------------------------------------------------------------------------------------------------------


def _torchvision(name: str, batch: int, pixels: int, small: Callable[[], Any], small_pixels: int) -> Callable:
    def make(full: bool) -> Case:
        models = library("torchvision.models")

        if full:
            return of(full, lambda: images(lambda: models.get_model(name), batch, pixels))
        return of(full, lambda: images(small, 8, small_pixels, 16))

    return make


def _small_resnet() -> Any:
    Bottleneck = library("torchvision.models.resnet").Bottleneck
    ResNet = library("torchvision.models.resnet").ResNet

    return ResNet(Bottleneck, [1, 3, 1, 1], num_classes=16, width_per_group=16)


def _small_convnext() -> Any:
    CNBlockConfig = library("torchvision.models.convnext").CNBlockConfig
    ConvNeXt = library("torchvision.models.convnext").ConvNeXt

    return ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 3)], num_classes=16, stochastic_depth_prob=0.1)


def _small_vit() -> Any:
    VisionTransformer = library("torchvision.models").VisionTransformer

    return VisionTransformer(32, 8, num_layers=3, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=16)


def _small_swin() -> Any:
    PatchMergingV2 = library("torchvision.models.swin_transformer").PatchMergingV2
    SwinTransformer = library("torchvision.models.swin_transformer").SwinTransformer
    SwinTransformerBlockV2 = library("torchvision.models.swin_transformer").SwinTransformerBlockV2

    return SwinTransformer(
        [4, 4],
        32,
        [2, 2],
        [2, 4],
        [4, 4],
        num_classes=16,
        block=SwinTransformerBlockV2,
        downsample_layer=PatchMergingV2,
    )


def _segmentation(full: bool) -> Case:
    import torch

    segmentation = library("torchvision.models.segmentation")

    def case() -> Case:
        size, batch, classes = (512, 64, 21) if full else (64, 8, 5)
        name = "deeplabv3_resnet101" if full else "deeplabv3_resnet50"
        module = segmentation.__dict__[name](weights=None, weights_backbone=None, num_classes=classes)
        targets = torch.zeros(batch, size, size, dtype=torch.int64)
        images = (torch.zeros(batch, 3, size, size),)
        return Case(module, images, targets=targets, loss=pixelwise, limits={"targets": classes})

    return of(full, case)


def _detection(full: bool) -> Case:
    import torch

    detection = library("torchvision.models.detection")

    size, batch = (800, 8) if full else (64, 2)
    images = [torch.zeros(3, size, size, device="meta" if full else "cpu") for _ in range(batch)]
    module = detection.retinanet_resnet50_fpn_v2(weights=None, weights_backbone=None)
    return Case(module.to("meta") if full else module, (images,))


def _detection_scores(full: bool) -> Case:
    """Make the detector without its filter of boxes by score.

    The images are one batch, and the outputs are scores and boxes of all anchors.
    """
    import torch
    from torch import nn

    detection = library("torchvision.models.detection")
    size, batch = (800, 8) if full else (64, 8)

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = detection.retinanet_resnet50_fpn_v2(weights=None, weights_backbone=None)
            self.backbone, self.head = whole.backbone, whole.head

        def forward(self, images: Any) -> Any:
            scores = self.head(list(self.backbone(images).values()))
            return scores["cls_logits"], scores["bbox_regression"]

    def case() -> Case:
        module = Scores()
        anchors = module(torch.zeros(1, 3, size, size))[0].shape[1]
        labels = torch.zeros(batch, anchors, dtype=torch.int64)
        return Case(module, (torch.zeros(batch, 3, size, size),), {}, labels, labelled, {"targets": 91})

    return of(full, case)


# --- timm -------------------------------------------------------------------------------------------------------------


def _timm(name: str, batch: int, small: dict[str, Any], **sizes: Any) -> Callable:
    """Return a maker of a timm model.

    `small` has the arguments of the small form: `pixels`, and `name` if it starts from a smaller model.
    """

    def make(full: bool) -> Case:
        timm = library("timm")

        if full:
            pixels = timm.get_pretrained_cfg(name).input_size[-1]
            return of(full, lambda: images(lambda: timm.create_model(name, **sizes), batch, pixels))
        arguments = {**small}
        pixels, base = arguments.pop("pixels"), arguments.pop("name", name)
        return of(full, lambda: images(lambda: timm.create_model(base, num_classes=16, **arguments), 8, pixels, 16))

    return make


# --- diffusers --------------------------------------------------------------------------------------------------------


def _sdxl(full: bool) -> Case:
    import torch

    UNet2DConditionModel = library("diffusers").UNet2DConditionModel

    shape: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "addition_embed_type": "text_time",
        "use_linear_projection": True,
    }
    wide: dict[str, Any] = {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    }
    narrow: dict[str, Any] = {
        "sample_size": 16,
        "block_out_channels": (32, 64, 64),
        "layers_per_block": 1,
        "transformer_layers_per_block": (1, 1, 3),
        "attention_head_dim": (2, 4, 4),
        "cross_attention_dim": 32,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    }

    def case() -> Case:
        batch, size, text, pooled = (64, 128, 2048, 1280) if full else (8, 16, 32, 32)
        sample = torch.zeros(batch, 4, size, size)
        return Case(
            UNet2DConditionModel(**shape, **(wide if full else narrow)),
            (sample, torch.zeros(batch), torch.zeros(batch, 77 if full else 8, text)),
            {
                "added_cond_kwargs": {"text_embeds": torch.zeros(batch, pooled), "time_ids": torch.zeros(batch, 6)},
                "return_dict": False,
            },
            targets=sample.clone(),
            loss=squared,
        )

    return of(full, case)


def _dit(full: bool) -> Case:
    import torch

    DiTTransformer2DModel = library("diffusers").DiTTransformer2DModel

    def case() -> Case:
        batch, size = (256, 32) if full else (8, 8)
        layers, heads, width = (28, 16, 72) if full else (3, 4, 8)
        module = DiTTransformer2DModel(
            num_attention_heads=heads,
            attention_head_dim=width,
            num_layers=layers,
            in_channels=4,
            out_channels=8,
            sample_size=size,
        )
        sample = torch.zeros(batch, 4, size, size)
        times, labels = (torch.zeros(batch, dtype=torch.int64) for _ in range(2))
        inputs = {"timestep": times, "class_labels": labels, "return_dict": False}
        limits = {"timestep": 1000, "class_labels": 1000}
        return Case(module, (sample,), inputs, torch.zeros(batch, 8, size, size), squared, limits)

    return of(full, case)


def _sd3(full: bool) -> Case:
    import torch

    SD3Transformer2DModel = library("diffusers").SD3Transformer2DModel

    def case() -> Case:
        batch, size, text = (64, 128, 4096) if full else (8, 16, 32)
        layers, heads, width = (24, 24, 64) if full else (4, 4, 8)
        module = SD3Transformer2DModel(
            sample_size=size,
            num_layers=layers,
            num_attention_heads=heads,
            attention_head_dim=width,
            joint_attention_dim=text,
            caption_projection_dim=heads * width,
            pooled_projection_dim=2048 if full else 32,
            pos_embed_max_size=192 if full else 16,
        )
        sample = torch.zeros(batch, 16, size, size)
        inputs = (
            sample,
            torch.zeros(batch, 333 if full else 8, text),
            torch.zeros(batch, 2048 if full else 32),
            torch.zeros(batch),
        )
        return Case(module, inputs, {"return_dict": False}, sample.clone(), squared)

    return of(full, case)


def _flux(full: bool) -> Case:
    import torch

    FluxTransformer2DModel = library("diffusers").FluxTransformer2DModel

    def case() -> Case:
        batch, image, text = (32, 4096, 512) if full else (8, 16, 8)
        double, single, heads = (19, 38, 24) if full else (3, 4, 4)
        module = FluxTransformer2DModel(
            guidance_embeds=True,
            num_layers=double,
            num_single_layers=single,
            num_attention_heads=heads,
            attention_head_dim=128 if full else 16,
            joint_attention_dim=4096 if full else 32,
            pooled_projection_dim=768 if full else 32,
            axes_dims_rope=(16, 56, 56) if full else (4, 6, 6),
        )
        hidden = torch.zeros(batch, image, 64)
        return Case(
            module,
            (),
            {
                "hidden_states": hidden,
                "encoder_hidden_states": torch.zeros(batch, text, 4096 if full else 32),
                "pooled_projections": torch.zeros(batch, 768 if full else 32),
                "timestep": torch.zeros(batch),
                "img_ids": torch.zeros(image, 3),
                "txt_ids": torch.zeros(text, 3),
                "guidance": torch.zeros(batch),
                "return_dict": False,
            },
            hidden.clone(),
            squared,
        )

    return of(full, case)


def _autoencoder(full: bool) -> Case:
    import torch

    AutoencoderKL = library("diffusers").AutoencoderKL

    def case() -> Case:
        batch, size = (32, 512) if full else (8, 32)
        widths = (128, 256, 512, 512) if full else (32, 32)
        module = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * len(widths),
            up_block_types=("UpDecoderBlock2D",) * len(widths),
            block_out_channels=widths,
            layers_per_block=2 if full else 1,
            latent_channels=4,
            sample_size=size,
        )
        pictures = torch.zeros(batch, 3, size, size)
        return Case(module, (pictures,), {"return_dict": False}, pictures.clone(), squared)

    return of(full, case)


# --- torchtitan -------------------------------------------------------------------------------------------------------


def _titan_llama(full: bool) -> Case:
    llama3_args = library("torchtitan.models.llama3").llama3_args
    TransformerModelArgs = library("torchtitan.models.llama3.model.args").TransformerModelArgs
    Transformer = library("torchtitan.models.llama3.model.model").Transformer

    def case() -> Case:
        if full:
            chosen = dataclasses.replace(llama3_args["8B"], vocab_size=128256, max_seq_len=8192)
            return tokens(Transformer(chosen), 16, 8192, 128256)
        small = TransformerModelArgs(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=64, max_seq_len=32)
        return tokens(Transformer(small), 8, 16, 64)

    return of(full, case)


def _titan_deepseek(full: bool) -> Case:
    deepseekv3_args = library("torchtitan.models.deepseek_v3").deepseekv3_args
    DeepSeekV3ModelArgs = library("torchtitan.models.deepseek_v3.model.args").DeepSeekV3ModelArgs
    DeepSeekV3Model = library("torchtitan.models.deepseek_v3.model.model").DeepSeekV3Model
    MoEArgs = library("torchtitan.models.moe").MoEArgs
    # The wrapper pads each expert's rows to multiples of eight by a Triton kernel, which no CPU or TPU runs.
    library("torchtitan.models.moe.moe").indices_padding_wrapper = lambda run: run

    def case() -> Case:
        if full:
            chosen = dataclasses.replace(deepseekv3_args["16B"], use_flex_attn=False, max_seq_len=4096)
            return tokens(DeepSeekV3Model(chosen), 16, 4096, chosen.vocab_size)
        small = DeepSeekV3ModelArgs(
            vocab_size=64,
            dim=32,
            inter_dim=64,
            moe_inter_dim=16,
            n_layers=4,
            n_heads=4,
            max_seq_len=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            moe_args=MoEArgs(num_experts=4, num_shared_experts=1, top_k=2, score_func="softmax"),
        )
        return tokens(DeepSeekV3Model(small), 8, 16, 64)

    return of(full, case)


# --- own code in the style of public code bases -----------------------------------------------------------------------


def _gpt(full: bool) -> Case:
    import torch
    from torch import nn
    from torch.nn import functional

    layers, heads, width, vocabulary, batch, length = (48, 25, 1600, 50304, 64, 1024) if full else (4, 4, 32, 64, 8, 16)

    class CausalSelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x: Any) -> Any:
            q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.proj(mixed.transpose(1, 2).flatten(2))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.attn = nn.LayerNorm(width), CausalSelfAttention()
            self.ln_2 = nn.LayerNorm(width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Any) -> Any:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
            self.h = nn.ModuleList(Block() for _ in range(layers))
            self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            self.lm_head.weight = self.wte.weight

        def forward(self, ids: Any) -> Any:
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
            for block in self.h:
                x = block(x)
            return self.lm_head(self.ln_f(x))

    return of(full, lambda: tokens(Net(), batch, length, vocabulary))


CRITEO = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209),
    *(11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
"""Rows of the tables of DLRM on Criteo's terabyte of clicks, capped at 40 million as in MLPerf."""


def _dlrm(full: bool) -> Case:
    import torch
    from torch import nn

    tables = CRITEO if full else (64, 32, 16, 3)
    width, batch = (128, 65536) if full else (16, 64)
    bottom, top = ((512, 256), (1024, 1024, 512, 256)) if full else ((32,), (32,))

    def tower(sizes: tuple[int, ...]) -> Any:
        parts: list[Any] = []
        for a, b in zip(sizes, sizes[1:], strict=False):
            parts += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*parts[:-1])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            count = len(tables) + 1
            self.bottom = tower((13, *bottom, width))
            self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in tables)
            self.top = tower((width + count * (count - 1) // 2, *top, 1))

        def forward(self, dense: Any, ids: list[Any]) -> Any:
            x = self.bottom(dense)
            looked_up = [table(each) for table, each in zip(self.tables, ids, strict=True)]
            rows = torch.stack([x, *looked_up], dim=1)
            products = rows @ rows.transpose(1, 2)
            i, j = torch.tril_indices(rows.shape[1], rows.shape[1], -1, device="cpu")
            return self.top(torch.cat([x, products[:, i, j]], dim=1)).squeeze(1)

    def case() -> Case:
        from torch.nn import functional

        ids = [torch.zeros(batch, 1, dtype=torch.int64) for _ in tables]
        clicks = torch.zeros(batch)
        loss = functional.binary_cross_entropy_with_logits
        limits = {f"ids.{i}": rows for i, rows in enumerate(tables)}
        return Case(Net(), (torch.zeros(batch, 13), ids), {}, clicks, loss, limits)

    return of(full, case)


def _graphs(layer: str, **options: Any) -> Callable[[bool], Case]:
    """Return a maker of three graph layers, on a graph of the size of ogbn-arxiv in full."""

    def make(full: bool) -> Case:
        import torch
        from torch import nn

        graphs = library("torch_geometric.nn")

        nodes, edges, features, width, classes = (169_344, 2_332_672, 128, 256, 40) if full else (64, 256, 16, 32, 8)

        def convolution(a: int, b: int) -> Any:
            if layer == "GATConv":
                return graphs.GATConv(a, b // 4, heads=4, **options)
            if layer == "GINConv":
                return graphs.GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b)))
            return getattr(graphs, layer)(a, b, **options)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = convolution(features, width), convolution(width, width)
                self.head = nn.Linear(width, classes)

            def forward(self, x: Any, edge_index: Any) -> Any:
                x = self.first(x, edge_index).relu()
                return self.head(self.second(x, edge_index).relu())

        def case() -> Case:
            inputs = (torch.zeros(nodes, features), torch.zeros(2, edges, dtype=torch.int64))
            targets = torch.zeros(nodes, dtype=torch.int64)
            return Case(Net(), inputs, {}, targets, labelled, {"edge_index": nodes, "targets": classes})

        return of(full, case)

    return make


def _scatter(full: bool) -> Case:
    import torch
    from torch import nn

    nodes, edges, features, width, classes = (169_344, 2_332_672, 128, 256, 40) if full else (64, 256, 16, 32, 8)

    class Layer(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.message, self.own = nn.Linear(2 * a, b), nn.Linear(a, b)

        def forward(self, x: Any, source: Any, goal: Any) -> Any:
            sent = self.message(torch.cat([x[source], x[goal]], dim=1)).relu()
            total = torch.zeros(x.shape[0], sent.shape[1], dtype=sent.dtype, device=x.device)
            return self.own(x) + total.index_add(0, goal, sent)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(features, width), Layer(width, width), Layer(width, width)])
            self.head = nn.Linear(width, classes)

        def forward(self, x: Any, source: Any, goal: Any) -> Any:
            for layer in self.layers:
                x = layer(x, source, goal).relu()
            return self.head(x)

    def case() -> Case:
        ends = [torch.zeros(edges, dtype=torch.int64) for _ in range(2)]
        targets = torch.zeros(nodes, dtype=torch.int64)
        limits = {"source": nodes, "goal": nodes, "targets": classes}
        return Case(Net(), (torch.zeros(nodes, features), *ends), {}, targets, labelled, limits)

    return of(full, case)


def _recurrent(kind: str, **options: Any) -> Callable[[bool], Case]:
    def make(full: bool) -> Case:
        from torch import nn

        width, layers, vocabulary, batch, length = (1024, 4, 32000, 128, 1024) if full else (32, 2, 64, 8, 12)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(vocabulary, width)
                self.rnn = getattr(nn, kind)(width, width, layers, batch_first=True, **options)
                ways = 2 if options.get("bidirectional") else 1
                self.head = nn.Linear(ways * width, vocabulary)

            def forward(self, ids: Any) -> Any:
                return self.head(self.rnn(self.embed(ids))[0])

        return of(full, lambda: tokens(Net(), batch, length, vocabulary))

    return make


def _transformer(full: bool) -> Case:
    import torch
    from torch import nn

    width, heads, layers, vocabulary, batch, length = (1024, 16, 6, 32768, 256, 256) if full else (32, 4, 3, 64, 8, 16)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.net = nn.Transformer(width, heads, layers, layers, 4 * width, batch_first=True)
            self.head = nn.Linear(width, vocabulary)

        def forward(self, source: Any, goal: Any) -> Any:
            mask = torch.full((goal.shape[1], goal.shape[1]), -math.inf, device=goal.device).triu(1)
            return self.head(self.net(self.embed(source), self.embed(goal), tgt_mask=mask))

    def case() -> Case:
        ids = [torch.zeros(batch, length, dtype=torch.int64) for _ in range(3)]
        return Case(Net(), (ids[0], ids[1]), {}, ids[2], labelled, {"": vocabulary})

    return of(full, case)


_SMALL_VIT = {"depth": 3, "embed_dim": 32, "num_heads": 4, "img_size": 32, "patch_size": 8, "pixels": 32}

PROGRAMS: dict[str, Entry] = {
    "resnet152": Entry("torchvision", _torchvision("resnet152", 512, 224, _small_resnet, 32), "v5e:4x4"),
    "convnext_large": Entry("torchvision", _torchvision("convnext_large", 512, 224, _small_convnext, 32), "v5e:4x4"),
    "vit_l_16": Entry("torchvision", _torchvision("vit_l_16", 512, 224, _small_vit, 32), "v5e:4x4"),
    "swin_v2_b": Entry("torchvision", _torchvision("swin_v2_b", 256, 256, _small_swin, 32), "v5e:4x4"),
    "deeplabv3_resnet101": Entry("torchvision", _segmentation),
    "retinanet_resnet50_fpn_v2": Entry("torchvision", _detection),
    "retinanet, scores of all anchors": Entry("torchvision", _detection_scores),
    "eva02_large_patch14_448": Entry("timm", _timm("eva02_large_patch14_448.mim_m38m_ft_in22k_in1k", 128, _SMALL_VIT)),
    "vit_so400m_patch14_siglip_384": Entry(
        "timm", _timm("vit_so400m_patch14_siglip_384.webli", 128, _SMALL_VIT, num_classes=1000)
    ),
    "maxvit_large_tf_512": Entry(
        "timm",
        _timm(
            "maxvit_large_tf_512.in1k",
            64,
            {"name": "maxvit_rmlp_pico_rw_256", "pixels": 64, "img_size": 64, "embed_dim": (32, 32, 32, 32)},
        ),
    ),
    "tf_efficientnetv2_xl": Entry(
        "timm", _timm("tf_efficientnetv2_xl.in21k_ft_in1k", 128, {"name": "tf_efficientnetv2_b0", "pixels": 64})
    ),
    "convnextv2_huge": Entry(
        "timm",
        _timm("convnextv2_huge.fcmae_ft_in1k", 256, {"depths": (1, 1, 3, 1), "dims": (16, 32, 32, 32), "pixels": 64}),
    ),
    "mixer_l16_224": Entry(
        "timm",
        _timm(
            "mixer_l16_224.goog_in21k_ft_in1k",
            512,
            {k: _SMALL_VIT[k] for k in _SMALL_VIT if k != "depth" and k != "num_heads"} | {"num_blocks": 3},
        ),
    ),
    "SDXL's UNet2DConditionModel": Entry("diffusers", _sdxl),
    "DiTTransformer2DModel XL/2": Entry("diffusers", _dit),
    "SD3Transformer2DModel": Entry("diffusers", _sd3, remat="full"),
    "FluxTransformer2DModel": Entry("diffusers", _flux, remat="full"),
    "AutoencoderKL": Entry("diffusers", _autoencoder),
    "Llama 3 8B": Entry("torchtitan", _titan_llama, remat="full"),
    "DeepSeek-V3 16B": Entry("torchtitan", _titan_deepseek, remat="full"),
    "GPT-2 XL": Entry("nanoGPT's style", _gpt, remat="full"),
    "DLRM": Entry("DLRM's style", _dlrm, optimizer="sgd"),
    "GCNConv": Entry("torch_geometric", _graphs("GCNConv")),
    "GATConv": Entry("torch_geometric", _graphs("GATConv")),
    "GCNConv, the data has its loops": Entry("torch_geometric", _graphs("GCNConv", add_self_loops=False)),
    "GATConv, the data has its loops": Entry("torch_geometric", _graphs("GATConv", add_self_loops=False)),
    "SAGEConv": Entry("torch_geometric", _graphs("SAGEConv")),
    "GINConv": Entry("torch_geometric", _graphs("GINConv")),
    "messages by index_add": Entry("torch", _scatter),
    "LSTM, 1024 steps": Entry("torch", _recurrent("LSTM")),
    "LSTM, both directions": Entry("torch", _recurrent("LSTM", bidirectional=True)),
    "GRU, 1024 steps": Entry("torch", _recurrent("GRU")),
    "RNN, 1024 steps": Entry("torch", _recurrent("RNN")),
    "nn.Transformer": Entry("torch", _transformer),
}
"""Entries of all rows, by name."""
