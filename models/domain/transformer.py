"""Compute parameters, gradient bytes and FLOPs of a transformer from its configuration.

The configuration has the keys of a Hugging Face `config.json`. Srift's names `layers`,
`hidden`, `sequence` and `parameters` can replace keys such as `num_hidden_layers`.
"""

from collections.abc import Mapping
from typing import Any

# For each size, the keys that may contain it, in Srift's and in Hugging Face's configurations.
_NAMES = {
    "layers": ("layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden", "hidden_size", "n_embd", "d_model"),
    "sequence": ("sequence", "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "key_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_size": ("head_dim",),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocabulary": ("vocab_size",),
    "parameters": ("parameters",),
}
# A configuration with one of these texts in a key is refused, unless the value is empty or false.
_REFUSED = ("expert", "encoder_decoder", "hidden_groups", "state_size", "ssm_")
USUAL_TOKENS = 2**20  # default tokens per global batch


def transformer_facts(config: Mapping[str, Any], sequence: int | None = None) -> dict[str, float]:
    """Return the fields of `Workload` that follow from a transformer's configuration.

    A sample is a sequence of tokens. The fields are:

        parameters         N, the number of weights. If the configuration does not state N, it is
                           computed without norms and biases, which are under 1 % of N.
        gradient_bytes     4 N
        flops_per_sample   (6 N + 12 * layers * hidden * sequence) * sequence
        layers, hidden     the number of layers, and their width
        sequence           tokens per sample: `sequence`, or the configuration's maximum length
        vocabulary         the number of different tokens; 0 if not stated

    Raises:
        ValueError: if a size is missing or is not a positive whole number, or if the network is not
            supported. Mixtures of experts, networks with a separate encoder, networks that share
            weights between layers, and networks other than transformers are not supported.
    """
    for name, value in config.items():
        keys = [name, *(value if isinstance(value, Mapping) else ())]
        if value and any(word in key for word in _REFUSED for key in keys):
            raise ValueError(
                f"{name} is set, but only dense networks with one stack of layers are supported"
            )
    sizes: dict[str, Any] = {
        name: config[key]
        for name, keys in _NAMES.items()
        for key in reversed(keys)  # the first key counts
        if config.get(key) is not None
    }
    if sequence:
        sizes["sequence"] = sequence
    needed = ["layers", "hidden", "sequence"]
    needed += [] if "parameters" in sizes else ["vocabulary"]
    for name in needed:
        if name not in sizes:
            raise ValueError(
                f"the configuration does not state {name}: set {' or '.join(_NAMES[name])}"
            )
    for name, value in sizes.items():
        if type(value) not in (int, float) or not 1 <= value <= 1e15 or value % 1:
            raise ValueError(f"{name} is {value!r}, but must be a whole number of at least 1")
    layers, hidden, tokens = (int(sizes[name]) for name in needed[:3])
    parameters = int(sizes.get("parameters") or _parameters(config, sizes))
    return {
        "parameters": parameters,
        "gradient_bytes": 4 * parameters,
        "flops_per_sample": (6.0 * parameters + 12.0 * layers * hidden * tokens) * tokens,
        "layers": layers,
        "hidden": hidden,
        "sequence": tokens,
        "vocabulary": int(sizes.get("vocabulary", 0)),
    }


def _parameters(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> float:
    """Return the number of weights in attention, feed-forward layers and embeddings.

    `sizes` has the sizes in `config` under Srift's names, such as `layers` and `heads`.
    """
    hidden, heads = sizes["hidden"], sizes.get("heads", 1)
    head = sizes.get("head_size", hidden / heads)
    inner = sizes.get("inner", config.get("expansion_ratio", 4) * hidden)
    # Networks with RMSNorm or SiLU, and ModernBERT, have a third matrix in the feed-forward layer:
    # a gate.
    gated = "rms_norm_eps" in config or config.get("hidden_act") == "silu"
    gated |= config.get("model_type") == "modernbert"
    shares_key = config.get("multi_query") and not config.get("new_decoder_architecture")
    key_heads = 1 if shares_key else sizes.get("key_heads", heads)
    attention = 2 * hidden * head * (heads + key_heads)
    tied = config.get("tie_word_embeddings", True)
    layer = attention + (2 + gated) * hidden * inner
    return float(sizes["layers"] * layer + (2 - bool(tied)) * sizes["vocabulary"] * hidden)
