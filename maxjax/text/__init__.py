"""Text and tokens: tokenizers, chat templates and streaming decoders, independent of any model.

``tokenizer/`` reads tokenizers. ``template/`` renders the chat templates of checkpoints in a sandbox
with limits on time and memory; ``chat`` is ``maxjax.apply_chat_template`` and ``tokenize_chat``.
``reasoning`` splits answers into reasoning, content and calls of functions: ``formats`` has the forms in which
families of models write them, and ``calls`` reads a call.
``stream`` decodes tokens to text as they are generated, with ``stream_decoders`` for each kind of decoder.
"""
