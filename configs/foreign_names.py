"""What users of other trainers call a setting, and the key it has here: for the hints of error messages.

From the options of MaxText, torchtitan, Megatron-LM, the Hugging Face Trainer and `config.json`, Lightning, nanoGPT and optax.
"""

from __future__ import annotations

FOREIGN_NAMES = {
    name: key
    for key, names in {
        "optimizer.learning_rate": "lr max_lr peak_lr base_lr learning_rate_init",
        "optimizer.b1": "beta1 adam_beta1 adam_b1 momentum",
        "optimizer.b2": "beta2 adam_beta2 adam_b2",
        "optimizer.eps": "epsilon adam_epsilon adam_eps",
        "optimizer.weight_decay": "wd adam_weight_decay",
        "optimizer.clip_norm": "grad_clip clip_grad max_grad_norm gradient_clip_val "
        "gradient_clipping gradient_clipping_threshold max_norm clip grad_clip_norm",
        "optimizer.kind": "optim optimizer_type opt_type optimizer_name",
        "schedule.kind": "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style scheduler decay_type",
        "schedule.warmup_steps": "warmup warmup_iters lr_warmup_iters warmup_steps_fraction warmup_ratio lr_warmup_steps num_warmup_steps",
        "schedule.final_fraction": "min_lr min_lr_ratio min_lr_factor cosine_learning_rate_final_fraction end_lr",
        "schedule.decay_fraction": "decay_ratio lr_decay_iters decay_steps",
        "trainer.steps": "max_steps train_steps training_steps total_steps num_steps train_iters max_iters "
        "num_train_steps n_steps iterations num_epochs epochs num_train_epochs max_epochs",
        "trainer.accumulation": "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps "
        "accumulate_grad_batches accumulation_steps num_microbatches microbatches",
        "trainer.log_every": "logging_steps log_interval log_freq log_period log_every_n_steps",
        "data.batch_size": "global_batch_size train_batch_size per_device_batch_size per_device_train_batch_size "
        "micro_batch_size local_batch_size batch bs",
        "data.seq_len": "seq_length sequence_length max_seq_length block_size context_length max_target_length max_length ctx_len",
        "data.train": "dataset dataset_path data_path train_data train_files dataset_name data_dir",
        "data.workers": "num_workers dataloader_num_workers num_data_workers",
        "data.prefetch": "prefetch_factor prefetch_size",
        "evaluation.every": "eval_interval eval_steps eval_every eval_freq val_check_interval",
        "evaluation.max_batches": "eval_iters limit_val_batches max_eval_batches",
        "evaluation.sets": "eval_dataset eval_data val_data validation_data",
        "checkpoint.every": "save_interval save_steps checkpoint_period checkpoint_interval save_every ckpt_interval",
        "checkpoint.keep_last": "save_total_limit keep_latest_k max_to_keep",
        "checkpoint.asynchronous": "async_checkpointing async_mode async_save enable_async_checkpointing",
        "init_from": "load_parameters_path resume_from resume resume_from_checkpoint load finetune_from pretrained initial_load_path",
        "run_dir": "output_dir out_dir base_output_directory dump_folder save_dir checkpoint_dir",
        "name": "run_name experiment_name job_name exp_name",
        "model.embed_dim": "hidden_size d_model n_embd dim base_emb_dim emb_dim model_dim hidden_dim",
        "model.num_layers": "num_hidden_layers n_layer n_layers layers base_num_decoder_layers depth",
        "model.num_heads": "num_attention_heads n_head n_heads base_num_query_heads heads",
        "model.num_kv_heads": "num_key_value_heads n_kv_heads base_num_kv_heads num_query_groups kv_heads",
        "model.latent_attention.q_rank": "q_lora_rank",
        "model.latent_attention.kv_rank": "kv_lora_rank",
        "model.latent_attention.nope_dim": "qk_nope_head_dim qk_head_dim",
        "model.latent_attention.rope_dim": "qk_rope_head_dim qk_pos_emb_head_dim",
        "model.latent_attention.value_dim": "v_head_dim",
        "model.mlp_dim": "intermediate_size ffn_hidden_size base_mlp_dim d_ff ffn_dim hidden_ff",
        "model.vocab_size": "padded_vocab_size n_vocab vocabulary_size",
        "model.max_seq_len": "max_position_embeddings n_positions max_position n_ctx",
        "model.norm_eps": "rms_norm_eps layer_norm_epsilon layer_norm_eps norm_epsilon normalization_layer_epsilon layernorm_epsilon",
        "model.rope_theta": "rotary_base rope_base rope_max_timescale",
        "model.local_rope_theta": "rope_local_base_freq local_rope_max_timescale",
        "model.rotary_fraction": "partial_rotary_factor rotary_percent rotary_pct",
        "model.full_attention_every": "sliding_window_pattern no_rope_layer_interval",
        "model.attention_chunk": "attention_chunk_size",
        "model.moe.every": "interleave_moe_layer_step",
        "model.attention_softcap": "attn_logit_softcapping attn_logits_soft_cap",
        "model.logit_softcap": "final_logit_softcapping final_logits_soft_cap",
        "model.tie_embeddings": "tie_word_embeddings weight_tying logits_via_embedding untie_embeddings_and_output_weights",
        "model.init_std": "initializer_range init_method_std",
        "model.activation": "hidden_act mlp_activations act_fn activation_function",
        "model.family": "model_type model_name architecture decoder_block flavor",
        "compute.remat.policy": "remat remat_policy activation_checkpoint "
        "activation_checkpointing recompute_granularity gradient_checkpointing checkpoint_policy",
        "compute.attention.backend": "attention attn_implementation attention_type "
        "attention_backend attn_type flash_attention use_flash_attn",
        "compute.scan_layers": "scan scan_blocks",
        "precision.compute": "dtype bf16 fp16 mixed_precision mixed_precision_param compute_dtype activation_dtype precision",
        "precision.params": "weight_dtype param_dtype params_dtype",
        "precision.matmul": "quantization fp8 float8 fp8_recipe",
        "mesh.fsdp": "fsdp_parallelism ici_fsdp_parallelism dcn_fsdp_parallelism data_parallel_shard_degree dp_shard fsdp_size",
        "mesh.data": "data_parallelism ici_data_parallelism dcn_data_parallelism data_parallel_replicate_degree dp dp_replicate",
        "mesh.tensor": "tp tensor_parallel tensor_parallelism "
        "ici_tensor_parallelism tensor_parallel_degree tensor_model_parallel_size tp_size",
        "mesh.pipeline": "pp pipeline_parallel pipeline_parallelism "
        "ici_pipeline_parallelism pipeline_parallel_degree pipeline_model_parallel_size pp_size",
        "mesh.context": "cp context_parallel context_parallelism ici_context_parallelism context_parallel_degree context_parallel_size",
        "mesh.expert": "ep expert_parallel expert_parallelism ici_expert_parallelism expert_parallel_degree expert_model_parallel_size",
        "logging.wandb_project": "wandb wandb_project_name report_to",
        "logging.tensorboard": "enable_tensorboard tensorboard_dir",
        "profiler.start_step": "profiler_start skip_first_n_steps_for_profiler enable_profiling profile_freq",
        "profiler.num_steps": "profiler_steps",
        "seed": "random_seed manual_seed init_weights_seed data_shuffle_seed",
    }.items()
    for name in names.split()
}
"""Name elsewhere -> key here."""


def key_for(name: str) -> str | None:
    """Return the key that a setting of this name (dotted or not, with dashes or underscores) has here; None when none is known."""
    last = name.rpartition(".")[2].lower().replace("-", "_")
    return FOREIGN_NAMES.get(last)
