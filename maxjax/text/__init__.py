"""Text and tokens: tokenizers, chat templates and streaming decoders, independent of any model.

``tokenizer/`` reads tokenizers. ``template/`` renders the chat templates of checkpoints in a sandbox
with limits on time and memory; ``chat`` is ``maxjax.apply_chat_template`` and ``tokenize_chat``.
``stream`` decodes tokens to text as they are generated, with ``stream_decoders`` for each kind of decoder.
"""
