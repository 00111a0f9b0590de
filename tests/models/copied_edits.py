"""For each file of an architecture and model type: six edits of one line that change what the model computes.

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
}
