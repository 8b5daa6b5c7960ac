"""Parameters that Transformer Engine's callables have, read from the sources of 2.9.0 and 2.20.2: those of both."""

SIGNATURES = {
    "pytorch.Linear": (
        "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker "
        "rng_tracker_name init_method bias return_bias params_dtype parallel_mode parameters_split device "
        "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute "
        "symmetric_ar_type save_original_input name"
    ),
    "pytorch.Linear.forward": "self inp is_first_microbatch fp8_output fp8_grad",
    "pytorch.LayerNormLinear": (
        "in_features out_features eps sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker "
        "init_method bias normalization return_bias params_dtype parallel_mode return_layernorm_output "
        "return_layernorm_output_gathered parameters_split zero_centered_gamma device ub_overlap_ag ub_overlap_rs "
        "ub_overlap_rs_dgrad ub_bulk_wgrad ub_bulk_dgrad ub_name delay_wgrad_compute symmetric_ar_type name"
    ),
    "pytorch.LayerNormLinear.forward": "self inp is_first_microbatch fp8_output fp8_grad",
    "pytorch.Linear.init_fp8_metadata": "self num_gemms",
    "pytorch.DotProductAttention": (
        "num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type window_size "
        "sequence_parallel tp_size get_rng_state_tracker tp_group layer_number attention_type cp_group cp_global_ranks "
        "cp_stream cp_comm_type softmax_scale softmax_type return_max_logit"
    ),
    "pytorch.DotProductAttention.forward": (
        "self query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv "
        "cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size "
        "checkpoint_core_attention core_attention_bias_type core_attention_bias alibi_slopes fast_zero_fill "
        "inference_params pad_between_seqs fp8_output"
    ),
    "pytorch.autocast": "enabled calibrating recipe amax_reduction_group _graph",
    "pytorch.initialize_ub": "shape tp_size use_fp8 quantization_modes dtype ub_cfgs bootstrap_backend",
    "pytorch.destroy_ub": "",
    "pytorch.is_fp8_available": "return_reason",
    "pytorch.is_mxfp8_available": "return_reason",
    "pytorch.is_fp8_block_scaling_available": "return_reason",
    "recipe.DelayedScaling": (
        "margin fp8_format amax_history_len amax_compute_algo scaling_factor_compute_algo reduce_amax fp8_dpa fp8_mha"
    ),
    "recipe.Float8CurrentScaling": (
        "use_power_2_scales fp8_format fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad fp8_dpa fp8_mha"
    ),
    "recipe.MXFP8BlockScaling": "margin fp8_format fp8_dpa fp8_mha",
    "recipe.Float8BlockScaling": (
        "use_f32_scales fp8_format x_block_scaling_dim w_block_scaling_dim grad_block_scaling_dim fp8_gemm_fprop "
        "fp8_gemm_dgrad fp8_gemm_wgrad fp8_dpa fp8_mha"
    ),
}
