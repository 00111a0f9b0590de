"""Rendering: plain rows become a few lines of text, a foldable tree in HTML, or a drawing.

``row`` has the rows, which each class of maxjax makes of itself, folds equal ones, and writes them as
text; ``rendered`` gives a class its ``__repr__`` and ``_repr_html_``, and writes rows as HTML.
``division`` draws which device holds which part of an array, ``picture`` draws numbers
(PNG images, histograms), and ``attention`` the weights of attention heads. Nothing here knows a
Weight or reads a device: arrays come in as NumPy arrays, and everything else as text and numbers.
"""
