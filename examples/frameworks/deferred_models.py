"""Makes a tiny model of every class of Transformers that predicts tokens, and its inputs.

``RULES`` shrink a configuration by the names of its fields. ``CONFIGS`` and ``INPUTS`` have the exceptions, by the
model's type.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

MAPPINGS = {
    "causal": "CAUSAL_LM", "encoder-decoder": "SEQ_TO_SEQ_CAUSAL_LM", "vision": "IMAGE_TEXT_TO_TEXT",
    "multimodal": "MULTIMODAL_LM", "speech": "SPEECH_SEQ_2_SEQ",
}  # fmt: skip
VOCABULARY, HIDDEN, ROWS, LENGTH = 128, 64, 2, 12
SPECIAL_IDS = 96  # ids of images, sounds and the like are at least this, and the tokens of a text are less
RULES: list[tuple[str, Any]] = [  # the first pattern that a field's name matches; a number only shrinks, scales are set
    (r"type_vocab_size|pretraining_tp|token_dropout", None),
    (r"unpadded_vocab_size", 120),
    (r"vocab_size(_per_layer_input)?$", VOCABULARY),
    (r"drop(out)?(_|$)|_?dropout|pdrop|layerdrop|jitter|drop_path", 0.0),
    (r"initializer_range$|^init_std$", 0.1),
    (r"^output_router_logits$", True),
    (r"router_aux_loss_coef|^aux_loss_coef|z_loss_coef", 0.1),
    (r"^final_logit_softcapping$|^logits_soft_cap$|^output_logit_soft_cap$", 1.5),
    (r"^logit_scale$|^lm_head_multiplier$|^output_multiplier$", 0.5),
    (r"^logits_scaling$|^logits_mup_width_multiplier$", 3.0),
    (r"experts_per_tok|moe_topk|moe_k$|top_k_experts|moe_top_k", 2),
    (r"num_experts$|local_experts$|routed_experts$|zero_expert_num", 4),
    (r"^n_groups?$|^topk_group$", 1),
    (r"^use_cache$", False),
    (r"(attention_heads|key_value_heads|kv_heads|n_heads?|num_heads|linear_num_\w+_heads)$", 4),
    (r"head_dim(_\w+)?$|kv_channels|attention_head_size|^d_kv$|dim_head|lora_rank$", 16),
    (r"(hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|^depth|^layers|num_blocks)$", 2),
    (r"(intermediate_size\w*|ffn_dim|ffn_hidden_size|d_ff|^dff|dim_ff|n_inner|mlp_dim|feed_forward_size)$", 64),
    (r"(hidden_size\w*|d_model|n_embd|emb_dim|embed_dim|hidden_dim|projection_dim|embedding_size)$", HIDDEN),
    (r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len)$", 64),
    (r"d_state$|^state_size$|ssm_state_size", 8),
]  # fmt: skip
"""Whole numbers only shrink. Ratios, switches and factors are set to these values."""
REQUIRED = {"num_key_value_heads", "head_dim"}  # not every class takes None for them
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def split_rope(*sections: int, **more: Any) -> dict[str, Any]:
    """Returns rotary embeddings of three axes. The sections add up to half of a head's rotated size."""
    return {"rope_parameters": DEFAULT_ROPE | {"mrope_section": list(sections)} | more}


SPLIT = split_rope(2, 3, 3)
SMALL_WAVE = {"conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_conv_pos_embeddings": 16,
              "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}  # fmt: skip
SMALL_SOUND = {"num_filters": 2, "depths": [1] * 7}
FIRST: dict[str, Callable[[], dict[str, Any]]] = {}
CONFIGS: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": DEFAULT_ROPE, "sliding_attention": DEFAULT_ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "nllb-moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
                       "indexer_compress_ratio": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "hash_seed": 0, "num_buckets": 2,
                 "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "chameleon": {"vocabulary_map": {"<image>": 100, "IMGIMGABCZ": 101, "IMGIMGBCDZ": 102}},
    "emu3": {"vocabulary_map": {"<image>": 100, "<|extra_200|>": 101, "<|visual token 000000|>": 102}},
    "qwen2_vl_text": SPLIT, "qwen2_5_vl_text": SPLIT, "glm4v_text": SPLIT, "glm46v_text": SPLIT, "glm_ocr_text": SPLIT,
    "glm4v_moe_text": split_rope(1, 1, 2, partial_rotary_factor=0.5), "paddleocr_vl_text": SPLIT,
    "qwen2_5_omni_text": SPLIT, "hunyuan_vl_text": SPLIT, "hy_v4_vl_text": SPLIT, "cosmos3_edge_text": SPLIT,
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "flint": {"mlp_only_layers": [0]},
    "mimo_v2_flash": {"num_key_value_heads": 2, "rope_parameters": {
        "full_attention": DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
        "sliding_attention": DEFAULT_ROPE | {"partial_rotary_factor": 0.5}}},
    "ernie4_5_vl_moe_text": split_rope(3, 3, 2),
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "chameleon_vqgan": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "resolution": 16},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "codebook_size": 32},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "num_embeddings": 32},
    "llama4_vision_model": {"projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64},
    "florence_vision": {"embed_dim": [16, 32], "num_heads": [2, 2], "num_groups": [2, 2], "depths": [1, 1],
                        "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1],
                        "patch_prenorm": [False, True]},
    "wav2vec2": SMALL_WAVE, "speecht5": SMALL_WAVE | {"vocab_size": VOCABULARY},
    "whisper": {"max_source_positions": 16},
    "xlnet": {"mem_len": None},
    "musicgen_decoder": {"num_codebooks": 2, "is_decoder": True},
    "musicgen_melody_decoder": {"num_codebooks": 2, "is_decoder": True},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": HIDDEN // 4}},
    "blip_text_model": {"is_decoder": True},
    "blip-2": {"image_token_index": 99, "num_query_tokens": 4},
    "instructblip": {"image_token_index": 99, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 99, "num_query_tokens": 4},
    "kosmos-2": {"latent_query_num": 4},
    "vibevoice_acoustic_tokenizer": SMALL_SOUND, "vibevoice_acoustic_tokenizer_encoder": SMALL_SOUND,
    "vibevoice_acoustic_tokenizer_decoder": SMALL_SOUND,
    "dots3_note_text": {f"swa_{name}": size for name, size in {
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 32,
        "qk_nope_head_dim": 16, "v_head_dim": 16}.items()},
    "dots3_note_vision_encoder": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
    "dots3_note_audio_encoder": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    "step3p5": {"sliding_window": 8},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 32, 64], "depths": [1] * 4},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}, "video_temporal_patch_size": 2},
    "mimi": {"upsample_groups": 16, "num_filters": 4, "codebook_size": 16, "codebook_dim": 16, "num_quantizers": 2,
             "vector_quantization_hidden_dimension": 16},
    "kyutai_speech_to_text": {"num_codebooks": 2, "codebook_vocab_size": VOCABULARY},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
}  # fmt: skip


def make_noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def make_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(5, SPECIAL_IDS, shape, generator=torch.Generator().manual_seed(3))


def make_image(model: Any, name: str = "vision_config") -> dict[str, Any]:
    config = getattr(model.config, name)
    return {"pixel_values": make_noise(ROWS, 3, config.image_size, config.image_size)}


def make_sound(*shape: int, name: str = "input_features") -> Callable[[Any], dict[str, Any]]:
    """Replaces the text by a sound."""
    return lambda _: {name: make_noise(ROWS, *shape), "input_ids": None}


def place_images(model: Any, count: int) -> dict[str, Any]:
    """Returns tokens of which the first ``count`` stand for the image."""
    config = model.config
    tokens = make_tokens(ROWS, LENGTH + count)
    tokens[:, :count] = getattr(config, "image_token_index", None) or config.video_token_index
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(LENGTH + count) < count, -100)}


def place_queries(model: Any, frames: int = 0) -> dict[str, Any]:
    """Returns an image, or ``frames`` images, and the tokens of BLIP's queries."""
    side, queries = model.config.vision_config.image_size, model.config.num_query_tokens
    pixels = make_noise(ROWS, *[frames] * (frames > 0), 3, side, side)
    return place_images(model, queries * max(frames, 1)) | {"pixel_values": pixels}


def make_codebooks(model: Any) -> dict[str, Any]:
    books = model.config.num_codebooks
    return {"input_ids": make_tokens(ROWS * books, LENGTH), "labels": make_tokens(ROWS, LENGTH, books)}


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {  # by the class's name or the model's type
    "WhisperForCausalLM": lambda _: {},
    "SeamlessM4TForTextToText": lambda _: {}, "SeamlessM4Tv2ForTextToText": lambda _: {},
    "blip": make_image,
    "blip-2": place_queries,
    "instructblip": lambda model: place_queries(model) | {"qformer_input_ids": make_tokens(ROWS, 4)},
    "instructblipvideo": lambda model: place_queries(model, 2) | {"qformer_input_ids": make_tokens(ROWS, 4)},
    "git": make_image,
    "kosmos-2": lambda model: make_image(model) | {
        "image_embeds_position_mask": (torch.arange(LENGTH) < model.config.latent_query_num).expand(ROWS, -1)},
    "pix2struct": lambda model: {"input_ids": None, "flattened_patches": torch.cat(
        [torch.ones(ROWS, 16, 2), make_noise(ROWS, 16, model.config.vision_config.patch_embed_hidden_size)], -1)},
    "kyutai_speech_to_text": lambda _: {"input_ids": make_tokens(ROWS, LENGTH, 3)},
    "vision-encoder-decoder": lambda model: make_image(model, "encoder") | {"input_ids": None},
    "musicgen_decoder": make_codebooks,
    "musicgen_melody_decoder": make_codebooks,
    "whisper": make_sound(80, 32),
    "speech_to_text": make_sound(32, 80),
    "seamless_m4t": make_sound(32, 160),
    "seamless_m4t_v2": make_sound(32, 160),
    "canary": make_sound(64, 80),
    "cohere_asr": make_sound(64, 128),
    "moonshine": make_sound(4000, name="input_values"),
    "moonshine_streaming": make_sound(4000, name="input_values"),
    "speecht5": make_sound(1000, name="input_values"),
    "speech-encoder-decoder": make_sound(1000, name="input_values"),
    "molmo2": lambda _: {"mm_token_type_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long)},
    "dia": lambda model: {
        "decoder_input_ids": make_tokens(ROWS, LENGTH, model.config.decoder_config.num_channels),
        "labels": make_tokens(ROWS * model.config.decoder_config.num_channels, LENGTH)},
    "idefics": lambda model: {
        "pixel_values": make_noise(ROWS, 1, 3, *[model.config.vision_config.image_size] * 2),
        "image_attention_mask": torch.ones(ROWS, LENGTH, 1, dtype=torch.long)},
    "udop": lambda _: {"bbox": make_noise(ROWS, LENGTH, 4).sigmoid()},
}  # fmt: skip


def list_classes() -> dict[str, tuple[str, str]]:
    """Returns the model's type and the kind of each class, by its name."""
    classes: dict[str, tuple[str, str]] = {}
    for kind, mapping in MAPPINGS.items():
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else names:
                if model_type in CONFIG_MAPPING_NAMES:
                    classes.setdefault(name, (model_type, kind))
    return classes


def shrink_field(name: str, value: Any, ids: dict[str, int]) -> Any:
    """Returns the small value of a field, or ``value`` if no rule matches."""
    if re.search(r"token_(id|index)$|_token_id_\w+$", name) and isinstance(value, int) and value >= SPECIAL_IDS:
        return ids.setdefault(name, SPECIAL_IDS + len(ids) % 31)
    rule = next((small for pattern, small in RULES if re.search(pattern, name)), None)
    if rule is None or isinstance(value, (str, list, dict, tuple)):
        return value
    if isinstance(rule, (float, bool)) or (value is None and name in REQUIRED):
        return rule
    return min(value, rule) if isinstance(value, int) and not isinstance(value, bool) else value


def shrink(config: Any, ids: dict[str, int]) -> dict[str, Any]:
    """Returns arguments for a small configuration of the class. ``ids`` gives a name the same id on every level."""
    small: dict[str, Any] = {}
    for name in type(config).__dataclass_fields__:
        value, default = vars(config).get(name), getattr(type(config), name, None)
        if isinstance(value, transformers.PreTrainedConfig):
            small[name] = shrink(value, ids) | {"model_type": value.model_type}
        elif re.search(r"layer_types$|layers_block_type$", name) and isinstance(value, (list, tuple)) and value:
            small[name] = [value[0], next((kind for kind in value if kind != value[0]), value[0])]
        elif (new := shrink_field(name, default, ids)) is not default and new != default:
            small[name] = new
    return merge(small, CONFIGS.get(config.model_type, {}))


def merge(arguments: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns ``arguments`` with ``changes``. A dictionary in ``changes`` changes the dictionary of the same name."""
    merged = dict(arguments)
    for name, value in changes.items():
        below = merged.get(name)
        merged[name] = merge(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged


def make_config(config_class: Any, tied: bool | None = None) -> Any:
    """Makes a small configuration. ``tied``: whether head and embedding share a weight; None is the class's default."""
    first = FIRST.get(config_class.model_type, dict)
    arguments = shrink(config_class(**first()), {})
    if config_class.is_encoder_decoder:
        arguments = {"pad_token_id": 0, "decoder_start_token_id": 0} | arguments
    if tied is not None:
        arguments = tie(arguments, tied)
    return config_class(**arguments)


def tie(arguments: dict[str, Any], tied: bool) -> dict[str, Any]:
    below = {name: tie(value, tied) for name, value in arguments.items() if name in ("text_config", "decoder")}
    return arguments | below | {"tie_word_embeddings": tied}


def make_model(name: str, tied: bool | None = None) -> Any:
    """Makes the tiny model in training mode, without dropout, so that two calls do not differ at random."""
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class._from_config(make_config(model_class.config_class, tied), attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model.train()


def make_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Draws tokens and labels, some of which do not count, and the class's other inputs from ``INPUTS``."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, SPECIAL_IDS, (ROWS, LENGTH), generator=generator)
    labels = tokens
    if model.config.is_encoder_decoder:
        labels = torch.randint(5, SPECIAL_IDS, (ROWS, LENGTH), generator=generator)
    labels = labels.masked_fill(torch.arange(LENGTH) < torch.tensor([[3], [0]]), -100)
    inputs = {"input_ids": tokens, "labels": labels} | INPUTS.get(
        type(model).__name__, INPUTS.get(model.config.model_type, lambda _: {})
    )(model)
    return {name: x for name, x in inputs.items() if x is not None}
