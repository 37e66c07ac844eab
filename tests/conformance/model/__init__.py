"""The rules of a store as a small in-memory model, so that any run of verbs can be compared with it.

Nothing here is fast and nothing is clever: every answer is computed from all records by the pure decisions of the core.
Where the rules leave a store a choice (which of two equal workers a key moves to, in which order an inbox serves its
queues), the model looks at what the store did and accepts it only if it is one of the allowed ones.
"""

from .comparison import differences
from .engine import Model
from .records import Mismatch, Sight

__all__ = ["Mismatch", "Model", "Sight", "differences"]
