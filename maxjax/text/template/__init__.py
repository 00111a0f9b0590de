"""Chat templates: Jinja programs from untrusted files, run with limits on time and memory.

``files`` finds the template of a checkpoint, and ``render`` runs it. ``sandbox`` limits what it may
call, ``caps`` the size of each call's result, ``budget`` the total size, and ``thread`` the time.
"""
