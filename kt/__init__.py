"""The Python API of kt: `load` opens a model, `Engine.generate` answers many prompts at once, `Chat` is a conversation.

Nothing here prints: what goes wrong is one of the errors of `ktcli.errors`, and warnings go to the logger `ktcli`. The
README has an example.
"""

from ktcli.api.chat import TextChat as Chat
from ktcli.api.engine import TextEngine as Engine
from ktcli.api.engine import load

__all__ = ["Chat", "Engine", "load"]
