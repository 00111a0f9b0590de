"""The parts of ``load_state_dict``, which loads a file or mapping into the weights of a Module.

``fit`` compares shapes and dtypes, ``memory`` checks that there is enough memory, and ``stacks``
loads the stacked weights of a LayerStack.
"""
