"""Written for files of Modular MAX: sampling inside a graph, at the paths of ``max.nn.sampling``.

maxjax itself does not import it: ``maxjax.generate`` samples with ``engine/sampling``. ``penalties`` is supported;
using another name raises NotImplementedError with advice.
"""

from ...absent import absent as _absent

__getattr__ = _absent(__name__)
