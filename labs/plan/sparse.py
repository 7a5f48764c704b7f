"""A model with experts in numbers: the shape that a plan needs, from a Hugging Face `config.json` or by name.

    SPARSE["qwen3-30b-a3b"]         a published shape
    read_sparse(folder)             the shape in a folder's config.json
    parameters(config)              parameters in all, and those that one token uses

    layer_matrices(config)          elements of all matrices of a layer
    expert_matrices(config)         those of its experts: each rank of the axis ep holds a part
    active_experts(config)          those of the experts that one token uses
    attention_operations(config, context)    of a layer and a token, forward and backward
    kept(config, tokens, recompute)          bytes that a layer keeps for backward

These functions take a dense `labs.model.Config`, too, which has no experts.  Some models have a few dense layers, or
attend to a window in some layers: the numbers are means over the layers, since a plan splits equal layers.

The experts are SwiGLUs of `expert_hidden` columns, `active` of `experts` for each token; `shared_hidden` columns work
on every token.  Multi-head latent attention [DeepSeek] projects x to `queries` and `keys` numbers and from these to
heads, of which `rotary` numbers carry the position.

Sources: the `config.json` of each model on Hugging Face; Mixtral, arXiv 2401.04088; Qwen3, arXiv 2505.09388; [DeepSeek]
DeepSeek-V3, arXiv 2412.19437, sections 2.1 and 4.2; GPT-OSS, arXiv 2508.10925.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from labs import cost
from labs.llama.config_json import read_json
from labs.model import Config


class Latent(NamedTuple):
    """Widths of multi-head latent attention: the two small vectors, and what a head has of queries, and of values."""

    queries: int
    keys: int
    plain: int
    rotary: int
    values: int


@dataclass(frozen=True)
class SparseConfig:
    """The shape of a model with experts; a field that `Config` has means the same.

    hidden: columns of the MLP of a dense layer.
    head_size: width of a head of queries and keys; it need not be dim / heads.
    experts, active: experts of a layer, and those that a token uses.
    expert_hidden, shared_hidden: columns of one expert, and of all shared experts together.
    dense_layers: layers that have an MLP in place of experts.
    window: tokens that every other layer attends to; 0 for all.

    Raises ValueError for sizes that no such model can have.
    """

    vocab: int
    dim: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    head_size: int
    experts: int
    active: int
    expert_hidden: int
    shared_hidden: int = 0
    dense_layers: int = 0
    window: int = 0
    latent: Latent | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.experts:
            raise ValueError(f"active is {self.active}: a token uses 1 to {self.experts} of {self.experts} experts")
        if not 0 <= self.dense_layers < self.depth:
            raise ValueError(f"dense_layers is {self.dense_layers}: the model has {self.depth} layers in all")

    @property
    def sparse_share(self) -> float:
        """Return the fraction of the layers that have experts."""
        return 1 - self.dense_layers / self.depth


Shape = Config | SparseConfig


def attention_matrices(config: SparseConfig) -> int:
    """Return the elements of the projections of attention."""
    dim, heads, latent = config.dim, config.heads, config.latent
    if latent is None:
        return dim * config.head_size * 2 * (heads + config.kv_heads)
    queries = dim * latent.queries + latent.queries * heads * config.head_size
    keys = dim * (latent.keys + latent.rotary) + latent.keys * heads * (latent.plain + latent.values)
    return queries + keys + heads * latent.values * dim


def expert_matrices(config: Shape) -> float:
    """Return the elements of all experts of a layer, without the shared ones."""
    return active_experts(config) * config.experts / config.active if isinstance(config, SparseConfig) else 0.0


def active_experts(config: Shape) -> float:
    if not isinstance(config, SparseConfig):
        return 0.0
    return config.sparse_share * config.active * 3 * config.dim * config.expert_hidden


def layer_matrices(config: Shape) -> float:
    if not isinstance(config, SparseConfig):
        return cost.layer_matrices(config)
    every = config.dim * (config.experts + 3 * config.shared_hidden)  # the router, and the shared experts
    dense = (1 - config.sparse_share) * 3 * config.dim * config.hidden
    return attention_matrices(config) + config.sparse_share * every + dense + expert_matrices(config)


def active_matrices(config: Shape) -> float:
    """Return the elements that one token uses of the matrices of a layer."""
    return layer_matrices(config) - expert_matrices(config) + active_experts(config)


def parameters(config: Shape) -> tuple[float, float]:
    """Return the parameters in all, and those that one token uses: matrices, embedding and head."""
    tables = (1 if config.tied else 2) * config.vocab * config.dim
    return (tables + config.depth * layer_matrices(config), tables + config.depth * active_matrices(config))


def attention_operations(config: Shape, context: int) -> float:
    if not isinstance(config, SparseConfig):
        return cost.attention_operations(config, context)
    values = config.latent.values if config.latent else config.head_size
    seen = (context + min(context, 2 * config.window)) / 2 if config.window else context
    return 6 * seen * config.heads * (config.head_size + values) / 2


def kept(config: SparseConfig, tokens: int, recompute: str = "none") -> float:
    """Return the bytes that a layer keeps of these tokens for backward, in 16 bits; the terms are those of `cost`.

    A token's row is copied for each of its experts.  The router's weight multiplies an expert's columns and not its
    result, as in Megatron-LM, so that no result has to be kept.
    """
    D, head = config.dim, config.head_size
    values = config.heads * (config.latent.values if config.latent else head)
    gave = values + 2 * config.heads  # attention's output, and a float32 per query
    projections = config.heads * head + 2 * values * config.kv_heads / config.heads
    rows = config.sparse_share * config.active
    columns = rows * config.expert_hidden + config.sparse_share * config.shared_hidden
    columns += (1 - config.sparse_share) * config.hidden
    numbers = {
        "none": 4 * D + gave + values + projections + rows * D + 4 * columns,
        "selective": 3 * D + gave + projections + rows * D + 2 * columns,
        "all but attention": D + gave,
        "full": D,
    }[recompute]
    return 2 * numbers * tokens


# ---- config.json -----------------------------------------------------------------------------------------

# Fields of a SparseConfig, and their names in the config.json of Mixtral, Qwen3-MoE, DeepSeek-V3 and GPT-OSS.
NAMES = {
    "vocab": ("vocab_size",),
    "dim": ("hidden_size",),
    "depth": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "hidden": ("intermediate_size",),
    "context": ("max_position_embeddings",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "active": ("num_experts_per_tok",),
    "expert_hidden": ("moe_intermediate_size", "intermediate_size"),
}
KNOWN = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def read_sparse(folder: str | Path) -> SparseConfig:
    """Read the shape of a folder's model with experts.  Raises ValueError for another kind of model."""
    path = Path(folder).expanduser() / "config.json"
    theirs = read_json(path)
    if (kind := theirs.get("model_type")) not in KNOWN:
        raise ValueError(f"{path} has model_type {kind!r}: the models with experts that a plan knows are {KNOWN}")
    if theirs.get("decoder_sparse_step", 1) != 1 or theirs.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"{path} has experts in some layers only, at intervals: a plan takes them in every layer")
    fields: dict[str, Any] = {}
    for ours, names in NAMES.items():
        fields[ours] = next((theirs[name] for name in names if theirs.get(name) is not None), None)
        if fields[ours] is None:
            raise ValueError(f"{path} does not say {' or '.join(names)}")
    latent = Latent(*(theirs[name] for name in LATENT)) if kind == "deepseek_v3" else None
    return SparseConfig(
        **fields,
        head_size=latent.plain + latent.rotary
        if latent
        else theirs.get("head_dim") or fields["dim"] // fields["heads"],
        shared_hidden=theirs.get("n_shared_experts", 0) * fields["expert_hidden"],
        dense_layers=theirs.get("first_k_dense_replace", 0) or len(theirs.get("mlp_only_layers", ())),
        window=theirs.get("sliding_window") or 0 if kind == "gpt_oss" else 0,
        latent=latent,
        tied=theirs.get("tie_word_embeddings", False),
    )


SPARSE = {
    "mixtral-8x7b": SparseConfig(32_000, 4096, 32, 32, 8, 14_336, 32_768, 128, 8, 2, 14_336),
    "qwen3-30b-a3b": SparseConfig(151_936, 2048, 48, 32, 4, 6144, 40_960, 128, 128, 8, 768),
    "qwen3-235b-a22b": SparseConfig(151_936, 4096, 94, 64, 4, 12_288, 40_960, 128, 128, 8, 1536),
    "gpt-oss-120b": SparseConfig(201_088, 2880, 36, 64, 8, 2880, 131_072, 64, 128, 4, 2880, window=128),
    "deepseek-v3": SparseConfig(
        *(129_280, 7168, 61, 128, 128, 18_432, 163_840, 192, 256, 8, 2048),
        shared_hidden=2048,
        dense_layers=3,
        latent=Latent(queries=1536, keys=512, plain=128, rotary=64, values=128),
    ),
}
