"""For each file of an architecture and model type: six edits that change what the model computes.

Each is a text that stands once in the file, and the text in its place.
"""

EDITS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "llama": {
        "llama": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            (
                "x + self.mlp(self.post_attention_layernorm(x))",
                "x + 0.5 * self.mlp(self.post_attention_layernorm(x))",
            ),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "granite": {
        "granite": [
            ("scale=self.scale", "scale=0.7 * self.scale"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            ("x = x + self.residual * y", "x = x + y"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            ("* (1 / self.config.logits_scaling)", "* self.config.logits_scaling"),
        ],
    },
    "gpt2": {
        "gpt2": [
            ("cache, scale=self.scale)", "cache, scale=0.7 * self.scale)"),
            ("activation(self.act)(self.c_fc(x))", "jax.nn.relu(self.c_fc(x))"),
            ("attend(q, k, v, cache", "attend(k, q, v, cache"),
            ("self.attn(self.ln_1(x), cache)", "self.attn(x, cache)"),
            ("x + self.mlp(self.ln_2(x))", "x + 0.5 * self.mlp(self.ln_2(x))"),
            ("self.wpe(learned_rows(cache,", "self.wpe(1 + learned_rows(cache,"),
        ],
    },
    "gpt_bigcode": {
        "gpt_bigcode": [
            ("cache, scale=self.scale)", "cache, scale=0.7 * self.scale)"),
            ("activation(self.act)(self.c_fc(x))", "jax.nn.relu(self.c_fc(x))"),
            ("attend(q, k, v, cache", "attend(q, v, k, cache"),
            ("self.attn(self.ln_1(x), cache)", "self.attn(x, cache)"),
            ("x + self.mlp(self.ln_2(x))", "x + 0.5 * self.mlp(self.ln_2(x))"),
            ("self.wpe(learned_rows(cache,", "self.wpe(1 + learned_rows(cache,"),
        ],
    },
    "gpt_neo": {
        "gpt_neo": [
            ("self.mask, scale=1.0)", "self.mask, scale=self.head_dim**-0.5)"),
            ("activation(self.act)(self.c_fc(x))", "jax.nn.relu(self.c_fc(x))"),
            ("CAUSAL if window is None else sliding(window)", "CAUSAL"),
            ("self.attn(self.ln_1(x), cache)", "self.attn(x, cache)"),
            ("x + self.mlp(self.ln_2(x))", "x + 0.5 * self.mlp(self.ln_2(x))"),
            ("x = x + self.wpe(rows)", "x = x - self.wpe(rows)"),
        ],
    },
    "gptj": {
        "gptj": [
            (
                "q, k = rope(q, angles), rope(k, angles)\n        y,",
                "q, k = rope(q[..., ::-1], angles), rope(k, angles)\n        y,",
            ),
            ("activation(self.act)(self.fc_in(x))", "jax.nn.relu(self.fc_in(x))"),
            ("return x + y + self.mlp(h)", "return x + y + self.mlp(self.ln_1(x + y))"),
            ("h = self.ln_1(x)", "h = x"),
            ("theta=10_000.0", "theta=100.0"),
            ("return self.ln_f(x), cache", "return x, cache"),
        ],
        "codegen": [
            (
                "rope(k, angles)  # [B, T, H, D]",
                "rope(k[..., ::-1], angles)  # [B, T, H, D]",
            ),
            ("activation(self.act)(self.fc_in(x))", "jax.nn.relu(self.fc_in(x))"),
            ("return x + y + self.mlp(h)", "return x + y + self.mlp(self.ln_1(x + y))"),
            ("q, v, k = (y[", "k, v, q = (y["),
            ("y[..., i, :, :].reshape", "y[..., i, ::-1, :].reshape"),
            ("return self.ln_f(x), cache", "return x, cache"),
        ],
    },
    "gpt_neox": {
        "gpt_neox": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(self.dense_h_to_4h(x))", "jax.nn.relu(self.dense_h_to_4h(x))"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            ("h = x if self.is_parallel else x + y", "h = x + y"),
            (
                "self.attention(self.input_layernorm(x), cache, angles)",
                "self.attention(x, cache, angles)",
            ),
            ("attend(q, k, v, cache", "attend(q, v, k, cache"),
        ],
    },
    "bloom": {
        "bloom": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ('activation("gelu_new")(self.dense_h_to_4h(x))', "jax.nn.relu(self.dense_h_to_4h(x))"),
            ("slopes = alibi_slopes(self.heads)", "slopes = 2 * alibi_slopes(self.heads)"),
            ("self.h, self.word_embeddings_layernorm(x), cache", "self.h, x, cache"),
            ("h = self.input_layernorm(x)", "h = x"),
            ("return self.ln_f(x), cache", "return x, cache"),
        ],
    },
    "mpt": {
        "mpt": [
            ("scale=self.scale", "scale=0.7 * self.scale"),
            ('activation("gelu")(self.up_proj(x))', "jax.nn.relu(self.up_proj(x))"),
            ("alibi_slopes(self.heads) ** self.steepness", "2 * alibi_slopes(self.heads)"),
            ("(jnp.clip(a, -self.bound, self.bound)", "(jnp.clip(a, 0, self.bound)"),
            ("self.attn(self.norm_1(x), cache)", "self.attn(x, cache)"),
            ("return self.norm_f(x), cache", "return x, cache"),
        ],
    },
    "falcon": {
        "falcon": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(self.dense_h_to_4h(x))", "jax.nn.relu(self.dense_h_to_4h(x))"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            ("h = self.ln_mlp(x)", "h = self.ln_mlp(x + y)"),
            ("self.ln_attn(x) if self.has_two_norms", "x if self.has_two_norms"),
            ("return x + y + self.mlp(h)", "return x + y + 0.5 * self.mlp(h)"),
        ],
    },
    "opt": {
        "opt": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(self.fc1(x))", "self.fc1(x)"),
            ("FIRST_ROW + learned_rows", "1 + FIRST_ROW + learned_rows"),
            ("x = self.self_attn_layer_norm(x + y)", "x = x + self.self_attn_layer_norm(y)"),
            ("self.final_layer_norm(x + self.mlp(x))", "x + self.mlp(self.final_layer_norm(x))"),
            ("attend(q, k, v, cache", "attend(k, q, v, cache"),
        ],
    },
    "olmo2": {
        "olmo2": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("rope(q, angles[self.kind]), rope", "rope(q[..., ::-1], angles[self.kind]), rope"),
            ("x + self.post_attention_layernorm(y)", "x + y"),
            ("self.q_norm(q.astype(x.dtype)), ", "q.astype(x.dtype), "),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "exaone4": {
        "exaone4": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("q, k = self.q_norm(q), self.k_norm(k)", "k = self.k_norm(k)"),
            ("x + self.post_attention_layernorm(y)", "x + y"),
            ("x + self.post_feedforward_layernorm(self.mlp(x))", "x + self.mlp(x)"),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "smollm3": {
        "smollm3": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            (
                "x + self.mlp(self.post_attention_layernorm(x))",
                "x + 0.5 * self.mlp(self.post_attention_layernorm(x))",
            ),
            ("        if self.uses_rope:", "        if True:"),
        ],
    },
    "ministral3": {
        "ministral3": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles, growth)",
                "self.self_attn(x, cache, angles, growth)",
            ),
            (
                "x + self.mlp(self.post_attention_layernorm(x))",
                "x + 0.5 * self.mlp(self.post_attention_layernorm(x))",
            ),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "cohere": {
        "cohere": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            ("return x + y + self.mlp(h), cache", "return x + y + self.mlp(x), cache"),
            ("super().logits(x) * self.config.logit_scale", "super().logits(x)"),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "bitnet": {
        "bitnet": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "activation(self.act)(up) * gate"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            ("y = self.attn_sub_norm(merge_heads(y))", "y = merge_heads(y)"),
            (
                "self.ffn_sub_norm(activation(self.act)(gate) * up)",
                "activation(self.act)(gate) * up",
            ),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "modernbert_decoder": {
        "modernbert-decoder": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "activation(self.act)(up) * gate"),
            ("rope(q, angles[self.kind]), rope", "rope(q[..., ::-1], angles[self.kind]), rope"),
            ("x if self.attn_norm is None else self.attn_norm(x)", "x"),
            ("super().logits(self.transform(x))", "super().logits(x)"),
            ("CAUSAL if window is None else sliding(window)", "CAUSAL"),
        ],
    },
    "cohere2_moe": {
        "cohere2_moe": [
            ("attend(q, k, v, cache, self.mask)", "attend(q, k, v, cache, self.mask, scale=0.3)"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            ("return x + y + self.mlp(h), cache", "return x + y + self.mlp(x), cache"),
            ("y = y / 2 if self.is_mean else y", "y = y / 3"),
            ("super().logits(x) * self.config.logit_scale", "super().logits(x)"),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "glm4": {
        "glm4": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            ("x + self.post_self_attn_layernorm(y)", "x + y"),
            ("x + self.post_mlp_layernorm(y)", "x + y"),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "phi3": {
        "phi3": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            (
                "x + self.mlp(self.post_attention_layernorm(x))",
                "x + 0.5 * self.mlp(self.post_attention_layernorm(x))",
            ),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "helium": {
        "helium": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            (
                "x + self.mlp(self.post_attention_layernorm(x))",
                "x + 0.5 * self.mlp(self.post_attention_layernorm(x))",
            ),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "nemotron": {
        "nemotron": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(self.up_proj(x))", "jax.nn.relu(self.up_proj(x))"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            (
                "x + self.mlp(self.post_attention_layernorm(x))",
                "x + 0.5 * self.mlp(self.post_attention_layernorm(x))",
            ),
            ("weight_offset=1.0", "weight_offset=0.5"),
        ],
    },
    "stablelm": {
        "stablelm": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            ("h = self.input_layernorm(x)", "h = x"),
            ("        x = x + y\n", "        x = x + 0.5 * y\n"),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "starcoder2": {
        "starcoder2": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(self.c_fc(x))", "jax.nn.relu(self.c_fc(x))"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            (
                "x + self.mlp(self.post_attention_layernorm(x))",
                "x + 0.5 * self.mlp(self.post_attention_layernorm(x))",
            ),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "ernie4_5": {
        "ernie4_5": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            (
                "x + self.mlp(self.post_attention_layernorm(x))",
                "x + 0.5 * self.mlp(self.post_attention_layernorm(x))",
            ),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "olmo": {
        "olmo": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            (
                "x + self.mlp(self.post_attention_layernorm(x))",
                "x + 0.5 * self.mlp(self.post_attention_layernorm(x))",
            ),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "gemma": {
        "gemma": [
            (
                "cache, with_blocks(CAUSAL), scale=self.head_dim**-0.5)",
                "cache, with_blocks(CAUSAL), scale=0.7 * self.head_dim**-0.5)",
            ),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            (
                "return x + self.mlp(self.post_attention_layernorm(x)), cache",
                "return x + 0.5 * self.mlp(self.post_attention_layernorm(x)), cache",
            ),
            ("weight_offset=1.0", "weight_offset=0.5"),
            ("x = x + y\n", "x = x - y\n"),
            (
                "x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)",
                "x * jnp.asarray(self.config.hidden_size, x.dtype)",
            ),
        ],
        "gemma2": [
            (
                "scale=self.scale, soft_cap=self.soft_cap",
                "scale=0.7 * self.scale, soft_cap=self.soft_cap",
            ),
            ("soft_cap=self.soft_cap)", "soft_cap=0.1)"),
            ("x = x + self.post_attention_layernorm(y)", "x = x + y"),
            ("y = self.mlp(self.pre_feedforward_layernorm(x))", "y = self.mlp(x)"),
            ("return x + self.post_feedforward_layernorm(y), cache", "return x + y, cache"),
            (
                'hidden states ``[..., E]``."""\n        return soft_cap(',
                'hidden states ``[..., E]``."""\n        return 0.5 * soft_cap(',
            ),
        ],
        "gemma3_text": [
            ("rope(self.q_norm(q), angles[self.kind])", "rope(q, angles[self.kind])"),
            ("self.mask, scale=self.scale)", "self.mask, scale=0.7 * self.scale)"),
            (
                "SLIDING: config.local_rope_parameters.angles(",
                "SLIDING: config.rope_parameters.angles(",
            ),
            (
                "x * jnp.asarray(config.hidden_size**0.5, x.dtype)",
                "x * jnp.asarray(config.hidden_size, x.dtype)",
            ),
            ("x = x + self.post_attention_layernorm(y)", "x = x + y"),
            ("return x + self.post_feedforward_layernorm(y), cache", "return x + y, cache"),
        ],
    },
    "gemma3n": {
        "gemma3n_text": [
            ("self.mask, scale=1.0, group=self.group)", "self.mask, scale=0.7, group=self.group)"),
            ("unit_rms(kv[1].astype(jnp.float32), self.eps).astype(x.dtype)", "kv[1]"),
            ("gate = jax.nn.relu(gate - threshold)", "gate = jax.nn.relu(gate)"),
            ("x = (x + self.laurel(h))", "x = (x + h)"),
            (
                "(self.modalities(x)).astype(x.dtype) + 1",
                "(self.modalities(x)).astype(x.dtype) + 0.5",
            ),
            ("return self.norm(jnp.mean(x, axis=0)), cache", "return self.norm(x[0]), cache"),
        ]
    },
    "gemma4": {
        "gemma4_text": [
            ("self.mask, scale=1.0, group=self.group)", "self.mask, scale=0.7, group=self.group)"),
            ("unit_rms(kv[-1].astype(jnp.float32), self.eps).astype(x.dtype)", "kv[-1]"),
            ("x = x + self.post_per_layer_input_norm(y)", "x = x + y"),
            (
                "return x * jnp.asarray(self.layer_scalar).astype(x.dtype)[0], cache",
                "return x, cache",
            ),
            ("FULL: config.rope_parameters.angles(", "FULL: config.local_rope_parameters.angles("),
            ("gate * p.astype(x.dtype)", "gate"),
        ]
    },
    "phi": {
        "phi": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("activation(self.act)(self.fc1(x))", "jax.nn.relu(self.fc1(x))"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            ("return x + y + self.mlp(h), cache", "return x + y + self.mlp(x), cache"),
            ("h = self.input_layernorm(x)", "h = x"),
            ("return self.final_layernorm(x), cache", "return x, cache"),
        ]
    },
    "apertus": {
        "apertus": [
            ("scale=self.head_dim**-0.5", "scale=0.7 * self.head_dim**-0.5"),
            ("self.act_fn(self.up_proj(x))", "jax.nn.relu(self.up_proj(x))"),
            ("rope(self.q_norm(q), angles)", "rope(q, angles)"),
            (
                "jnp.where(wide > 0, above, below) + beta * wide",
                "jnp.where(wide > 0, above, below)",
            ),
            (
                "x + self.mlp(self.feedforward_layernorm(x))",
                "x + 0.5 * self.mlp(self.feedforward_layernorm(x))",
            ),
            ("return self.norm(x), cache", "return x, cache"),
        ]
    },
    "mixtral": {
        "mixtral": [
            ('self.top_k, "softmax of chosen")', 'self.top_k, "softmax")'),
            ("attend(q, k, v, cache, self.mask)", "attend(q, v, k, cache, self.mask)"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            ("self.experts(x, chosen, shares)", "self.experts(x, chosen, 0.5 * shares)"),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "qwen3": {
        "qwen3": [
            ("rope(self.q_norm(q), angles)", "rope(q, angles)"),
            ("attend(q, k, v, cache, self.mask)", "attend(q, v, k, cache, self.mask)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("x + self.mlp(self.post_attention_layernorm(x))", "x + self.mlp(x)"),
            ("return self.norm(x), cache", "return x, cache"),
        ],
        "qwen3_moe": [
            ("rope(self.q_norm(q), angles)", "rope(q, angles)"),
            ("attend(q, k, v, cache, self.mask)", "attend(q, v, k, cache, self.mask)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            ("self.experts(x, chosen, shares)", "self.experts(x, chosen, 0.5 * shares)"),
            ("route(scores, self.top_k, self.shares)", "route(-scores, self.top_k, self.shares)"),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "qwen2_moe": {
        "qwen2_moe": [
            ("attend(q, k, v, cache, self.mask)", "attend(q, v, k, cache, self.mask)"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            ("self.experts(x, chosen, shares)", "self.experts(x, chosen, 0.5 * shares)"),
            ("route(scores, self.top_k, self.shares)", "route(-scores, self.top_k, self.shares)"),
            ("share * self.shared_expert(x)", "self.shared_expert(x)"),
        ],
    },
    "olmoe": {
        "olmoe": [
            ("attend(q, k, v, cache)", "attend(q, v, k, cache)"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            ("self.experts(x, chosen, shares)", "self.experts(x, chosen, 0.5 * shares)"),
            ("route(scores, self.top_k, self.shares)", "route(-scores, self.top_k, self.shares)"),
            ("self.q_norm(q.astype(x.dtype)), ", "q.astype(x.dtype), "),
        ],
    },
    "granitemoe": {
        "granitemoe": [
            ("scale=self.scale", "scale=0.7 * self.scale"),
            ('self.top_k, "softmax of chosen")', 'self.top_k, "softmax")'),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            ("x = x + self.residual * y", "x = x + y"),
            ("* (1 / self.config.logits_scaling)", "* self.config.logits_scaling"),
        ],
    },
    "phimoe": {
        "phimoe": [
            ('self.top_k, "softmax of near")', 'self.top_k, "softmax")'),
            ("attend(q, k, v, cache, self.mask)", "attend(q, v, k, cache, self.mask)"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            ("self.experts(x, chosen, shares)", "self.experts(x, chosen, 0.5 * shares)"),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "gpt_oss": {
        "gpt_oss": [
            ("return (up + 1) * gate", "return up * gate"),
            ('self.top_k, "softmax of chosen")', 'self.top_k, "softmax")'),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            ("cache, self.mask, sinks=", "cache, self.mask, sinks=2 + "),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "llama4": {
        "llama4_text": [
            (
                "x[..., None, :] * shares[..., None].astype(x.dtype)",
                "x[..., None, :] + 0 * shares[..., None]",
            ),
            ('self.top_k, "sigmoid")', 'self.top_k, "softmax")'),
            ("divided_by_rms(q, self.epsilon), divided", "q, divided"),
            ("jnp.sum(y, axis=-2) + self.shared_expert(x)", "jnp.sum(y, axis=-2)"),
            ("        if self.uses_rope:", "        if True:"),
            ("config.floor_scale, 1.0)", "config.floor_scale, 3.0)"),
        ],
    },
    "minimax_m2": {
        "minimax_m2": [
            ("normalised=True, bias=bias", "bias=bias"),
            (
                "bias = jnp.asarray(self.e_score_correction_bias)",
                "bias = -9 * jnp.asarray(self.e_score_correction_bias)",
            ),
            ("attend(q, k, v, cache)", "attend(q, v, k, cache)"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
            ("self.q_norm(q.astype(x.dtype)), ", "q.astype(x.dtype), "),
        ],
    },
    "mamba": {
        "mamba": [
            ("jnp.exp(jnp.asarray(self.A_log)", "jnp.cosh(jnp.asarray(self.A_log)"),
            ("u * per_feature(self.D, u)", "u"),
            ("* jax.nn.silu(z.astype(jnp.float32))", "* z"),
            ("jax.nn.softplus(self.dt_proj(", "jax.nn.relu(self.dt_proj("),
            ("selective_scan(u, dt, a, b, c, cache,", "selective_scan(u, dt, a, c, b, cache,"),
            ("return x + y.astype(x.dtype), cache", "return x - y.astype(x.dtype), cache"),
        ],
        "falcon_mamba": [
            ("jnp.exp(jnp.asarray(self.A_log)", "jnp.cosh(jnp.asarray(self.A_log)"),
            ("unit_rms(v, self.epsilon) for v in (dt, b, c)", "v for v in (dt, b, c)"),
            ("u = activation(self.act)(u)", "u = u"),
            ("jax.nn.softplus(self.dt_proj(", "jax.nn.relu(self.dt_proj("),
            ("u, z = jnp.split(", "z, u = jnp.split("),
            ("return x + y.astype(x.dtype), cache", "return x - y.astype(x.dtype), cache"),
        ],
    },
    "jamba": {
        "jamba": [
            ("jnp.exp(jnp.asarray(self.A_log)", "jnp.cosh(jnp.asarray(self.A_log)"),
            ("self.dt_layernorm(dt), self.b_layernorm(b),", "dt, self.b_layernorm(b),"),
            ("attend(q, k, v, cache)", "attend(q, k, v, cache, scale=0.1)"),
            ('route(self.router(x), self.top_k, "softmax")', 'route(self.router(x), 1, "softmax")'),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("mixer(self.input_layernorm(x), cache)", "mixer(x, cache)"),
        ],
    },
    "kimi_linear": {
        "kimi_linear": [
            ("scale=(N + R) ** -0.5", "scale=0.7 * (N + R) ** -0.5"),
            ("unit(q) * D**-0.5, unit(k), v,", "unit(q) * D**-0.5, k, v,"),
            ("g = -rate * jax.nn.softplus(", "g = -rate * jax.nn.relu("),
            ("* jax.nn.sigmoid(z.astype(jnp.float32))", "* jax.nn.silu(z.astype(jnp.float32))"),
            ("c, r = self.kv_a_layernorm(kv[..., :-R]),", "c, r = kv[..., :-R],"),
            ("self.experts(x, chosen, shares)", "self.experts(x, chosen, shares**2)"),
        ],
    },
    "nemotron_h": {
        "nemotron_h": [
            ("y, cache = attend(q, k, v, cache)", "y, cache = attend(q, v, k, cache)"),
            ("self.normalised, factor=self.factor", "self.normalised, factor=0.5"),
            ("self.experts(h, chosen, shares)", "self.experts(h, chosen, shares**2)"),
            ("return y + self.shared_experts(x)", "return y"),
            (
                "dt * -jnp.exp(per_feature(self.A_log, dt))",
                "dt * -per_feature(self.A_log, dt) ** 2",
            ),
            ("self.norm(y, z).astype(x.dtype)", "self.norm(y, y).astype(x.dtype)"),
        ],
    },
    "deepseek": {
        "deepseek_v3": [
            (
                "attend(q, k, k, cache, scale=self.scale,",
                "attend(q, k, k, cache, scale=0.7 * self.scale,",
            ),
            ("rope(q[..., N:], angles)", "q[..., N:]"),
            ("self.kv_a_layernorm(kv[..., :-R])", "kv[..., :-R]"),
            ("expand_values(y[..., R:],", "expand_values(0.5 * y[..., R:],"),
            ("bias=self.gate.e_score_correction_bias if self.is_balanced else None", "bias=None"),
            ("self.experts(x, chosen, shares)", "self.experts(x, chosen, shares**2)"),
        ],
        "glm4_moe_lite": [
            (
                "attend(q, k, k, cache, scale=self.scale,",
                "attend(q, k, k, cache, scale=0.7 * self.scale,",
            ),
            ("k = rope(kv[..., None, -R:], angles)", "k = kv[..., None, -R:]"),
            (
                "self.q_a_layernorm(self.q_a_proj(x).astype(x.dtype))",
                "self.q_a_proj(x).astype(x.dtype)",
            ),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("scores, self.top_k, self.scoring", 'scores, self.top_k, "softmax"'),
            ("else y + self.shared_experts(x)", "else y - self.shared_experts(x)"),
        ],
        "deepseek_v32": [
            ("chosen=chosen)", "chosen=None)"),
            ("angles = dataclasses.replace(angles, interleaved=False)", "angles = angles"),
            ("k = self.k_norm(self.wk(x).astype(x.dtype))", "k = self.wk(x).astype(x.dtype)"),
            ("weights, self.count, cache)", "-weights, self.count, cache)"),
            ("top_keys(q, k, weights", "top_keys(q[..., ::-1], k, weights"),
            ("q = self.q_b_proj(compressed)", "q = self.q_b_proj(2 * compressed)"),
        ],
    },
    "glm4_moe": {
        "glm4_moe": [
            ("q, k = self.q_norm(q), self.k_norm(k)", "q, k = self.q_norm(q), k"),
            (
                "q, k = rope(q, angles), rope(k, angles)",
                "q, k = rope(q[..., ::-1], angles), rope(k, angles)",
            ),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("self.gate(x.astype(jnp.float32))", "self.gate(2 * x.astype(jnp.float32))"),
            ("else y + self.shared_experts(x)", "else y"),
            ("return self.norm(x), cache", "return x, cache"),
        ],
    },
    "ernie4_5_moe": {
        "ernie4_5_moe": [
            ("y, cache = attend(q, k, v, cache)", "y, cache = attend(q, k, v, cache, scale=0.1)"),
            (
                "q, k = rope(q, angles), rope(k, angles)",
                "q, k = rope(q[..., ::-1], angles), rope(k, angles)",
            ),
            ("activation(self.act)(gate) * up", "jax.nn.relu(gate) * up"),
            ("bias=self.moe_statics()", "bias=-self.moe_statics()"),
            ("normalised=True", "normalised=False"),
            ("else y + self.shared_experts(x)", "else y"),
        ],
    },
    "hunyuan": {
        "hunyuan_v1_moe": [
            (
                "self.query_layernorm(rope(q, angles))",
                "rope(self.query_layernorm(q), angles) * 0.5",
            ),
            ("self.key_layernorm(rope(k, angles))", "rope(k, angles)"),
            ('"softmax of chosen"', '"softmax"'),
            ("shares) + self.shared_mlp(x)", "shares)"),
            ("self.wg(x)", "-self.wg(x)"),
            (
                "self.self_attn(self.input_layernorm(x), cache, angles)",
                "self.self_attn(x, cache, angles)",
            ),
        ],
    },
    "bert": {
        "bert": [
            ("both_ways(q, k, v, mask", "both_ways(0.7 * q, k, v, mask"),
            ("return activation(self.act)(self.dense(x)", "return jax.nn.relu(self.dense(x)"),
            (
                "return add_norm(self.LayerNorm, x, self.dense(y))",
                "return x + self.LayerNorm(self.dense(y))",
            ),
            ("self.position_embeddings(positions)", "self.position_embeddings(1 + positions)"),
            (
                "linears([self.query, self.key, self.value]",
                "linears([self.query, self.value, self.key]",
            ),
            (
                '"""A BERT with a head for texts: a reranker, for example."""',
                'head_pooling = "mean"',
            ),
        ],
        "roberta": [
            ("both_ways(q, k, v, mask", "both_ways(0.7 * q, k, v, mask"),
            ("positions_past_padding(ids, indices, self.config.pad_token_id)", "indices"),
            ("return activation(self.act)(self.dense(x)", "return jax.nn.relu(self.dense(x)"),
            ("return self.output(self.self(x, mask), x)", "return self.output(x, x)"),
            ("return self.lm_head(x)", "return self.lm_head(0.5 * x)"),
            (
                '"""A RoBERTa with a head for texts: a reranker, for example."""',
                'head_act = "relu"',
            ),
        ],
        "electra": [
            ("both_ways(q, k, v, mask", "both_ways(0.7 * q, k, v, mask"),
            (
                "x = self.embeddings_project(x).astype(x.dtype)",
                "x = 0.5 * self.embeddings_project(x)",
            ),
            (
                "return self.output(self.intermediate(x), x)",
                "return self.output(self.intermediate(x), -x)",
            ),
            ('activation("gelu")(self.dense(x)', "jax.nn.relu(self.dense(x)"),
            ("return self.LayerNorm(y).astype(x.dtype)", "return y"),
            ('head_act: ClassVar[str] = "gelu"', 'head_act: ClassVar[str] = "tanh"'),
        ],
    },
    "distilbert": {
        "distilbert": [
            ("both_ways(q, k, v, mask", "both_ways(0.7 * q, k, v, mask"),
            ("activation(self.act)(self.lin1(x)", "jax.nn.relu(self.lin1(x)"),
            (
                "add_norm(self.output_layer_norm, x, self.ffn(x))",
                "x + self.output_layer_norm(self.ffn(x))",
            ),
            ("self.position_embeddings(positions)", "self.position_embeddings(1 + positions)"),
            ("y = self.vocab_layer_norm(y).astype(x.dtype)", "y = y"),
            ('activation("relu")(self.pre_classifier', 'activation("tanh")(self.pre_classifier'),
        ],
    },
    "mpnet": {
        "mpnet": [
            ("np.where(distances > 0, half, 0)", "np.where(distances < 0, half, 0)"),
            ("mask, bias=bias,", "mask, bias=0.5 * bias,"),
            ("activation(self.act)(self.dense(x)", "jax.nn.relu(self.dense(x)"),
            (
                "add_norm(self.LayerNorm, x, self.attn(x, mask, bias))",
                "x + self.LayerNorm(self.attn(x, mask, bias))",
            ),
            ("positions_past_padding(ids, indices, _PADDING)", "indices"),
            (
                '"""An MPNet with a head for texts: a reranker, for example."""',
                'head_pooling = "mean"',
            ),
        ],
    },
    "albert": {
        "albert": [
            ("both_ways(q, k, v, mask", "both_ways(0.7 * q, k, v, mask"),
            ("activation(self.act)(self.ffn(x)", "jax.nn.relu(self.ffn(x)"),
            (
                "add_norm(self.full_layer_layer_norm, x, self.ffn_output(y).astype(x.dtype))",
                "x + self.full_layer_layer_norm(self.ffn_output(y))",
            ),
            ("i * groups // layers for i", "0 for i"),
            ("self.decoder(self.LayerNorm(y).astype(x.dtype))", "self.decoder(y)"),
            ("super().__call__(x[:, 0])", "super().__call__(x[:, 1])"),
        ],
    },
    "deberta_v2": {
        "deberta-v2": [
            ("(self.head_dim * (1 + len(self.kinds))) ** -0.5", "self.head_dim**-0.5"),
            ("linear(distances[None]), classes.T)", "linear(distances[None]), classes)"),
            ("found = places[:, None] - places", "found = places - places[:, None]"),
            ("rows if self.LayerNorm is None else self.LayerNorm(rows)", "rows"),
            ("return activation(self.act)(self.dense(x)", "return jax.nn.relu(self.dense(x)"),
            (
                "return add_norm(self.LayerNorm, x, self.dense(y))",
                "return x + self.LayerNorm(self.dense(y))",
            ),
        ],
    },
    "modernbert": {
        "modernbert": [
            ("config.local_attention // 2 if self.kind == SLIDING else None", "None"),
            ("rope(q, angles[self.kind]), rope", "rope(q[..., ::-1], angles[self.kind]), rope"),
            ("activation(self.act)(gate) * up", "activation(self.act)(up) * gate"),
            ("x + self.attn(y, mask, angles)", "x + self.attn(x, mask, angles)"),
            (
                "self.norm(activation(self.act)(self.dense(x)))",
                "activation(self.act)(self.dense(x))",
            ),
            ("return self.config.classifier_pooling", 'return "mean"'),
        ],
    },
    "jina": {
        "jina_embeddings_v3": [
            ("both_ways(q, k, v, mask", "both_ways(0.7 * q, k, v, mask"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            ("activation(self.act)(self.fc1(x)", "jax.nn.relu(self.fc1(x)"),
            (
                "add_norm(self.norm1, x, self.mixer(x, mask, angles))",
                "x + self.norm1(self.mixer(x, mask, angles))",
            ),
            ("x = self.emb_ln(x).astype(x.dtype)", "x = x"),
            (
                '"""Jina\'s encoder with a head for texts: a reranker, for example."""',
                'head_pooling = "mean"',
            ),
        ],
    },
    "nomic": {
        "nomic_bert": [
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            ("activation(self.act)(gate) * up", "activation(self.act)(up) * gate"),
            ("add_norm(self.norm2, x, self.mlp(x))", "x + self.norm2(self.mlp(x))"),
            ("x = self.emb_ln(x).astype(x.dtype)", "x = x"),
            ("return self.layer_norm(y).astype(x.dtype)", "return y"),
            (
                '"""A Nomic BERT with a head for texts: a reranker, for example."""',
                'head_pooling = "mean"',
            ),
        ],
    },
    "gte": {
        "gte": [
            ("both_ways(q, k, v, mask", "both_ways(0.7 * q, k, v, mask"),
            ("rope(q, angles), rope(k, angles)", "rope(q[..., ::-1], angles), rope(k, angles)"),
            ("activation(self.act)(gate) * up", "activation(self.act)(up) * gate"),
            ("return self.LayerNorm(total).astype(x.dtype)", "return total"),
            ("x = add_norm(self.attn_ln, x, ", "x = add_norm(self.attn_ln, 0.5 * x, "),
            (
                '"""A GTE with a head for texts: a reranker, for example."""',
                'head_pooling = "mean"',
            ),
        ],
    },
    "siglip": {
        "siglip": [
            ("y = both_ways(q, k, v, mask,", "y = both_ways(0.7 * q, k, v, mask,"),
            ("activation(self.act)(self.fc1(x)", "jax.nn.relu(self.fc1(x)"),
            ("self.self_attn(self.layer_norm1(x)", "self.self_attn((x)"),
            ("return x + self.mlp(", "return x + 0.5 * self.mlp("),
            ("y = y + self.mlp(self.layernorm(y)", "y = self.mlp(self.layernorm(y)"),
            ("self.head(x[:, -1])", "self.head(x[:, 0])"),
        ],
    },
    "clip": {
        "clip": [
            ("y = both_ways(q, k, v, mask,", "y = both_ways(0.7 * q, k, v, mask,"),
            ("activation(self.act)(self.fc1(x)", "jax.nn.relu(self.fc1(x)"),
            ("x = self.pre_layrnorm(x)", "x = (x)"),
            ("return x + self.mlp(", "return x + 0.5 * self.mlp("),
            ("causal = jnp.tril(", "causal = ("),
            ("self.post_layernorm(x[:, 0])", "self.post_layernorm(x[:, 1])"),
        ],
    },
    "vit": {
        "vit": [
            ("both_ways(q, k, v, softmax", "both_ways(0.7 * q, k, v, softmax"),
            ("return y if self.act is None else activation(self.act)(y)", "return y"),
            ("self.attention(self.layernorm_before(x)", "self.attention((x)"),
            (
                "return x + self.output(self.intermediate(",
                "return x + 0.5 * self.output(self.intermediate(",
            ),
            ("x = self.layernorm(x)", "x = (x)"),
            (
                "prepend(jnp.concatenate(tokens, axis=1) + first, x)",
                "prepend(jnp.concatenate(tokens, axis=1) - first, x)",
            ),
        ],
        "deit": [
            ("both_ways(q, k, v, softmax", "both_ways(0.7 * q, k, v, softmax"),
            ("return y if self.act is None else activation(self.act)(y)", "return y"),
            ("self.attention(self.layernorm_before(x)", "self.attention((x)"),
            (
                "return x + self.output(self.intermediate(",
                "return x + 0.5 * self.output(self.intermediate(",
            ),
            ("x = self.layernorm(x)", "x = (x)"),
            (
                "prepend(jnp.concatenate(tokens, axis=1) + first, x)",
                "prepend(jnp.concatenate(tokens, axis=1) - first, x)",
            ),
        ],
    },
    "dinov2": {
        "dinov2": [
            ("both_ways(q, k, v, softmax", "both_ways(0.7 * q, k, v, softmax"),
            ("activation(self.act)(self.fc1(x)", "jax.nn.relu(self.fc1(x)"),
            (
                "x = x + self.layer_scale1(self.attention(self.norm1(x)",
                "x = x + self.layer_scale1(self.attention((x)",
            ),
            (
                "return x + self.layer_scale2(self.mlp(",
                "return x + 0.5 * self.layer_scale2(self.mlp(",
            ),
            ("x = self.layernorm(x)", "x = (x)"),
            (
                "prepend(jnp.asarray(self.cls_token) + first, x)",
                "prepend(jnp.asarray(self.cls_token) - first, x)",
            ),
        ],
        "dinov2_with_registers": [
            ("both_ways(q, k, v, softmax", "both_ways(0.7 * q, k, v, softmax"),
            ("activation(self.act)(self.fc1(x)", "jax.nn.relu(self.fc1(x)"),
            (
                "x = x + self.layer_scale1(self.attention(self.norm1(x)",
                "x = x + self.layer_scale1(self.attention((x)",
            ),
            (
                "return x + self.layer_scale2(self.mlp(",
                "return x + 0.5 * self.layer_scale2(self.mlp(",
            ),
            ("x = self.layernorm(x)", "x = (x)"),
            (
                "prepend(jnp.asarray(self.cls_token) + first, x)",
                "prepend(jnp.asarray(self.cls_token) - first, x)",
            ),
        ],
    },
    "dinov3_vit": {
        "dinov3_vit": [
            ("both_ways(q, k, v, softmax", "both_ways(0.7 * q, k, v, softmax"),
            ("y = activation(self.act)(up)", "y = jax.nn.relu(up)"),
            (
                "x = x + self.layer_scale1(self.attention(self.norm1(x)",
                "x = x + self.layer_scale1(self.attention((x)",
            ),
            (
                "return x + self.layer_scale2(self.mlp(",
                "return x + 0.5 * self.layer_scale2(self.mlp(",
            ),
            ("rope(q, angles), rope(k, angles)\n", "rope(q[..., ::-1], angles), rope(k, angles)\n"),
            ("x = self.norm(x)", "x = (x)"),
        ],
    },
}

# The same for the vision parts of vision-language models, by model type: their features change.
VISION_PARTS: dict[str, list[tuple[str, str]]] = {
    "llava": [
        ("activation(self.act)(self.linear_1(x).astype(x.dtype))", "self.linear_1(x).astype(x.dtype)"),
        ("return self.linear_2(y).astype(x.dtype)", "return 0.5 * self.linear_2(y).astype(x.dtype)"),
        ('raw.get("vision_feature_layer", -2)', "-3"),
        ("[:, self.first :]", "[:, self.first :][:, ::-1]"),
        ("self.linear_1(x)", "self.linear_1(0.5 * x)"),
        ("self.multi_modal_projector(jnp.concatenate", "self.multi_modal_projector(1 + jnp.concatenate"),
    ],
    "llava_next": [
        ("side, size = tower.image_size // tower.patch_size, tower.image_size", "side, size = 2, 8"),
        (".swapaxes(1, 2)", ".swapaxes(0, 1).swapaxes(1, 2).swapaxes(0, 1)"),
        ("np.asarray(self.image_newline.value)", "0.5 * np.asarray(self.image_newline.value)"),
        ("np.concatenate([tiles[0], grid])", "np.concatenate([tiles[0], grid[::-1]])"),
        ("(newline, (len(grid), 1, len(newline)))", "(newline[::-1], (len(grid), 1, len(newline)))"),
        ("np.concatenate([grid, lines], axis=1)", "np.concatenate([lines, grid], axis=1)"),
    ],
    "pixtral": [
        ("rope(q, angles), rope(k, angles), v, real)", "q, k, v, real)"),
        ("(activation(self.act)(gate) * up)", "(jax.nn.relu(gate) * up)"),
        ("self.attention(self.attention_norm(x), angles, real)", "self.attention(x, angles, real)"),
        ("x + self.feed_forward(self.ffn_norm(x))", "x + 0.5 * self.feed_forward(self.ffn_norm(x))"),
        ("self.ln_pre(self.patch_conv(patches))", "self.patch_conv(patches)"),
        ("at[:, :1] * freqs[None, 0::2]", "at[:, :1] * freqs[None, 1::2]"),
    ],
    "mistral3": [
        ("self.patch_merger(self.norm(x))", "self.patch_merger(x)"),
        (".swapaxes(2, 3)  # [1, P / m², F, m²]", ""),
        ("rope(q, angles), rope(k, angles), v, real)", "rope(q, angles), k, v, real)"),
        ("x + self.attention(self", "x + 0.5 * self.attention(self"),
        ("freqs = 1.0 /", "freqs = 0.5 /"),
        ("at[:, 1:] * freqs[None, 1::2]", "at[:, 1:] * freqs[None, 0::2]"),
    ],
    "gemma3": [
        (".mean((2, 4))", ".max((2, 4))"),
        ("weight_offset=1.0", "weight_offset=0.5"),
        ("self.mm_soft_emb_norm(x.reshape(count, self.side**2, -1))", "x.reshape(count, self.side**2, -1)"),
        ("tower.layer_norm_eps, weight", "0.1, weight"),
        ("matmul(x.astype", "matmul(2 * x.astype"),
        ("self.vision_tower(pixels).last_hidden_state", "self.vision_tower.hidden_states(pixels)"),
    ],
    "idefics3": [
        (".swapaxes(2, 3)", ".swapaxes(2, 3)[:, :, ::-1]"),
        ("return self.proj(x).astype(x.dtype)", "return 0.5 * self.proj(x).astype(x.dtype)"),
        ("self.connector(self.vision_model(pixels).last_hidden_state)",
         "self.connector(self.vision_model.hidden_states(pixels))"),
        ("x = x.reshape(count, side", "x = x[:, ::-1].reshape(count, side"),
        ("self.proj(x)", "self.proj(jax.nn.relu(x))"),
        ("self.vision_model(pixels)", "self.vision_model(0.5 * pixels)"),
    ],
    "llava_onevision": [
        ("at = np.maximum(at - np.float32(0.5), 0)", "at = np.maximum(at, 0)"),
        ("* (1 - share) + next_one", "* share**2 + next_one"),
        ("next_one * share", "0 * next_one * share"),
        ("np.float32(count / size)", "np.float32(1)"),
        ("np.minimum(at.astype(np.int64), count - 1)", "np.minimum(at.astype(np.int64) + 1, count - 1)"),
        ('{**given, "vision_config": tower}', '{**given, "vision_feature_layer": -2, "vision_config": tower}'),
    ],
    "paligemma": [
        ("return self.linear(x).astype(x.dtype)", "return 0.5 * self.linear(x).astype(x.dtype)"),
        ("self.linear(x)", "self.linear(0.5 * x)"),
        ("return self.linear(x)", "return self.linear(jax.nn.relu(x))"),
        ("self.vision_tower(pixels).last_hidden_state", "self.vision_tower.hidden_states(pixels)"),
        ("self.vision_tower(pixels)", "self.vision_tower(0.5 * pixels)"),
        ("self.multi_modal_projector(self.vision", "self.multi_modal_projector(1 + self.vision"),
    ],
    "qwen2_vl": [
        ("both_ways(rope(q, angles), rope(k, angles), v, real)", "both_ways(q, k, v, real)"),
        ("activation(self.act)(self.fc1(x).astype(x.dtype))", "self.fc1(x).astype(x.dtype)"),
        ("self.attn(self.norm1(x).astype(x.dtype), angles, real)", "self.attn(x, angles, real)"),
        ("x + self.mlp(self.norm2(x).astype(x.dtype))", "x + 0.5 * self.mlp(self.norm2(x).astype(x.dtype))"),
        ("self.ln_q(x).astype(x.dtype)", "x"),
        ("last(gelu(first(x).astype(x.dtype)))", "last(first(x).astype(x.dtype))"),
    ],
    "qwen2_5_vl": [
        ("rope(q, angles), rope(k, angles)", "q, k"),
        ("self.window = None if is_full else config.window", "self.window = config.window"),
        ("(activation(self.act)(gate) * up)", "(jax.nn.relu(gate) * up)"),
        ("self.attn(self.norm1(x), angles, real)", "self.attn(x, angles, real)"),
        ("x + self.mlp(self.norm2(x))", "x + 0.5 * self.mlp(self.norm2(x))"),
        ("self.ln_q(x).reshape", "x.reshape"),
    ],
    "qwen3_vl": [
        ("both_ways(rope(q, angles), rope(k, angles), v, real)", "both_ways(q, k, v, real)"),
        ("x + learned.astype(x.dtype)[None]", "x"),
        ("self.attn(self.norm1(x).astype(x.dtype), angles, real)", "self.attn(x, angles, real)"),
        ("x + self.mlp(self.norm2(x).astype(x.dtype))", "x + 0.5 * self.mlp(self.norm2(x).astype(x.dtype))"),
        ("self.norm(join(x)) if self.joins_first", "join(x) if self.joins_first"),
        ("self.merger(x), [merger(y)", "self.merger(x), [merger(y ** 2)"),
    ],
}  # fmt: skip
