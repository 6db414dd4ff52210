"""The facts that follow from the shape of a transformer."""

import pytest

from models.domain.transformer import transformer_facts

LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "is_encoder_decoder": False}
# Configurations on Hugging Face, and the parameters of the published weights.
PUBLISHED = {
    "llama-2-7b": (
        LLAMA | {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096},
        6_738_415_616,
    ),
    "llama-3-8b": (
        LLAMA
        | {"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192}
        | {"num_key_value_heads": 8},
        8_030_261_248,
    ),
    "gpt2": (
        {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
        | {"n_inner": None},
        124_439_808,
    ),
    "mpt-7b": (
        {"d_model": 4096, "n_layers": 32, "n_heads": 32, "max_seq_len": 2048}
        | {"vocab_size": 50432, "expansion_ratio": 4},
        6_649_286_656,
    ),
    "falcon-7b": (
        {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71}
        | {"multi_query": True, "vocab_size": 65024, "max_position_embeddings": 2048},
        6_921_720_704,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_published_weights(name):
    config, parameters = PUBLISHED[name]
    assert transformer_facts(config)["parameters"] == pytest.approx(parameters, rel=0.01)


def test_flops_and_tokens_are_those_of_a_sample():
    facts = transformer_facts(PUBLISHED["llama-2-7b"][0], sequence=2048)
    dense = 6 * facts["parameters"] * 2048
    assert facts["sequence"] == 2048
    assert facts["flops_per_sample"] == dense + 12 * 32 * 4096 * 2048**2
    stated = transformer_facts({"layers": 2, "hidden": 8, "sequence": 4, "parameters": 1e3})
    assert (stated["parameters"], stated["gradient_bytes"]) == (1000, 4000)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocabulary"),
        ({"num_hidden_layers": 1.5}, "layers"),
        ({"num_hidden_layers": float("inf")}, "layers"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"ffn_config": {"moe_num_experts": 16}}, "ffn_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_hidden_groups": 1}, "num_hidden_groups"),
        ({"state_size": 16}, "state_size"),
    ],
)
def test_what_has_no_such_shape_is_refused(change, named):
    with pytest.raises(ValueError, match=named):
        transformer_facts(PUBLISHED["llama-2-7b"][0] | change)
