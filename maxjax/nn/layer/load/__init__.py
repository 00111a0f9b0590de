"""``load_state_dict``: values from a file or mapping into the weights of a Module.

``fit`` compares names, shapes and dtypes, ``memory`` checks that devices have room, ``stacks``
fills the stacked weights of a LayerStack.
"""
