"""How many tokens a row of a program may have: where the tables that its positions index end.

A program is walked once over bounds of its integers, as functions of the tokens of a row (`lengths`, `bounds`), which
`rules` carries through operators; `accesses` says which operators read tables, and `walk` where the first one ends.
"""

from mlx_transmuter.program.position_limit.walk import PositionLimit, find_position_limit

__all__ = ["PositionLimit", "find_position_limit"]
