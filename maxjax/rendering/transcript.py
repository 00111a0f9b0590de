"""Texts of models as HTML: chats, and single answers."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from .rendered import boxed
from .row import short

_MOST_MESSAGES, _LONGEST = 40, 4000
_TEXT = (
    "white-space:pre-wrap;overflow-wrap:anywhere;font-family:system-ui,sans-serif;font-size:13px"
)


def transcript(title: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The HTML of a chat: its last messages, each with its role.

    Args:
        title: text of the first line.
        messages: messages with ``role`` and ``content``; other content than text is shown as Python
            writes it.

    Example:
        >>> page = transcript("Chat", [{"role": "user", "content": "1 < 2?"}])
        >>> "1 &lt; 2?" in page
        True
    """
    shown = messages[-_MOST_MESSAGES:]
    left = len(messages) - len(shown)
    lines = [f"<s>… {left:,} earlier messages</s>"] if left else []
    for message in shown:
        content = message.get("content")
        text = content if isinstance(content, str) else short(content, 400)
        edge = "#f0a24b" if message.get("role") == "assistant" else "#4c86b8"
        lines.append(
            f'<div style="border-left:3px solid {edge};padding:1px 8px;margin:4px 0">'
            f"<s>{html.escape(short(message.get('role'), 40))}</s>{paragraph(text)}</div>"
        )
    return boxed(f"<b>{html.escape(short(title, 300))}</b>{''.join(lines)}")


def paragraph(text: str) -> str:
    """Text as HTML with its line breaks; the middle of a very long one is left out."""
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half:,} characters …\n{text[-half:]}"
    # HTML has no place for lone surrogates and control characters other than line breaks.
    safe = "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)
    return f'<div style="{_TEXT}">{html.escape(safe)}</div>'
