"""PyTorch files: zip archives and the older single-stream format. No pickle is executed.

``pickles`` interprets a pickle's opcodes and returns plain data, ``pickle_machine`` holds its stack
and memo, ``names`` lists the globals that are known, ``tensors`` makes the entries of tensors, and
``tree`` derives their names from nested dicts. ``legacy`` reads files from before PyTorch 1.6;
``reader`` opens both formats.
"""
