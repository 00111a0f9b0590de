"""Rendering: plain rows become a few lines of text, a foldable tree in HTML, or a drawing.

``row`` has the class Row: each class of maxjax describes its objects by rows. It folds equal rows, and
writes them as text. ``rendered`` gives a class its ``__repr__`` and ``_repr_html_``, and writes rows as
HTML. ``division`` draws which device holds which part of an array, ``picture`` draws numbers (PNG images,
histograms), and ``attention`` the weights of attention heads. Nothing here knows the class Weight or
reads a device, except that ``draw_attention`` copies the array it is given: all else is text and numbers.
"""
