"""The parts of ``load_state_dict``, which loads a file or mapping into the weights of a Module.

``fit`` compares names, shapes and dtypes, ``memory`` checks that the memory suffices, ``stacks``
fills the stacked weights of a LayerStack.
"""
