"""What a layer keeps of a sequence from one step to the next, and what reading it costs.

The parts of a model declare it (`state`); engine and planner lay out and count memory from it. Positions
lie in pages that can leave memory and come back; what has no positions (a recurrent layer) lies beside.
"""

from __future__ import annotations

from dataclasses import dataclass

# States of a sequence that are held: those of two steps, one of which is written while the other is read, and
# of four earlier positions to go back to (see `engine.states`).
STATE_SLOTS = 6


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's state of one sequence.

    Attributes:
        position_elements: cached for each position, in pages: bf16, f32 when exact.
        sequence_elements: f32 that are kept whatever the length, and rewritten by every token.
        ops_per_token: operations (a multiply-add is two) of one token with those.
        ops_per_position: of one token against one cached position.
        window: a token reads only the last so many positions, itself included; 0: all.
    """

    position_elements: int = 0
    sequence_elements: int = 0
    ops_per_token: int = 0
    ops_per_position: int = 0
    window: int = 0

    def positions_read(self, start: int, n_tokens: int) -> int:
        """Cached positions that a step of tokens start … start + n_tokens - 1 touches."""
        return n_tokens + (min(start, self.window - 1) if self.window else start)

    def pairs(self, start: int, n_tokens: int) -> int:
        """(token, position) pairs of that step."""
        end = start + n_tokens
        whole = end * (end + 1) // 2 - start * (start + 1) // 2
        if not self.window:
            return whole
        beyond = max(0, end - self.window), max(0, start - self.window)
        return whole - (beyond[0] * (beyond[0] + 1) - beyond[1] * (beyond[1] + 1)) // 2
