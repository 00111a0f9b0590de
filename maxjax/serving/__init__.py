"""The server of ``maxjax serve``: OpenAI's API over an :class:`maxjax.Engine`, as an ASGI application.

``app.py`` is read first: it has the routes, and what happens to every request. ``fields.py`` says which fields a
request may have, and ``chat.py``, ``text.py``, ``responses.py``, ``vectors.py`` and ``about.py`` answer it.
``generation.py`` gives prompts to the engine, ``admission.py`` is the queue in front of it, ``http.py`` reads bodies
and sends answers, and ``run.py`` listens on a port.
"""

from .app import app as app
