"""The scenarios that wait for a later step of the plan, each by name."""

STEPS = {
    6: "gguf_allocate forward_dequantize_gguf_blocks",
}
PENDING = {name: step for step, names in STEPS.items() for name in names.split()}
