"""Text and tokens: tokenizers, chat templates, and streaming decoders. Knows no model.

``tokenizer/`` reads tokenizers; ``template/`` renders chat templates of checkpoints in a sandbox
with bounds of time and memory; ``chat`` is ``maxjax.apply_chat_template``; ``stream`` turns tokens
into text as they come, with ``stream_decoders`` for each kind of decoder.
"""
