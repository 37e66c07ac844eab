"""The rules of a store as a small in-memory model, so that any run of verbs can be compared with it.

The model is simple and slow: every answer is computed from all records by the pure functions of `fairlane.model`.
Where the rules leave a store a choice (which of two equal workers a key moves to, in which order an inbox serves its
queues), the model reads what the store did and accepts it only if it is one of the allowed choices.
"""

from .comparison import differences
from .engine import Model
from .records import Mismatch, Sight

__all__ = ["Mismatch", "Model", "Sight", "differences"]
