"""Length: a number that follows from the tokens of a row and of a step; TokenRange: rows of some numbers of tokens."""

from __future__ import annotations

from typing import NamedTuple


class Length(NamedTuple):
    """tokens · T + step · S + constant, for a row of T tokens after a step of S of them, where 1 ≤ S ≤ T."""

    tokens: int = 0
    step: int = 0
    constant: int = 0

    @property
    def as_constant(self) -> int | None:
        """The number where it is the same for every row and step; else None."""
        return None if self.tokens or self.step else self.constant

    def plus(self, other: Length) -> Length:
        """Returns the sum."""
        return Length(self.tokens + other.tokens, self.step + other.step, self.constant + other.constant)

    def minus(self, other: Length) -> Length:
        """Returns the difference."""
        return self.plus(other.times(-1))

    def times(self, factor: int) -> Length:
        """Returns the product with a constant."""
        return Length(self.tokens * factor, self.step * factor, self.constant * factor)

    @property
    def changes_sign_after(self) -> int | None:
        """The most tokens of a row up to which it is positive, or up to which it is not; None where that depends on the
        step, or on nothing."""
        if self.step or not self.tokens:
            return None
        if self.tokens > 0:
            return -self.constant // self.tokens
        return -(self.constant // self.tokens) - 1

    def is_at_least(self, other: Length) -> bool:
        """Whether it is at least the other one in all steps of long rows."""
        difference = self.minus(other)
        # It is linear in S: the least is at one of the ends, S = 1 and S = T.
        ends = (
            (difference.tokens, difference.constant + difference.step),
            (
                difference.tokens + difference.step,
                difference.constant,
            ),
        )
        return all(slope > 0 or (slope == 0 and at_zero >= 0) for slope, at_zero in ends)

    def most_tokens_at_most(self, limit: Length) -> int | None:
        """Returns the most tokens of a row for which it is at most `limit` whatever the step; None where that is so for
        rows of any length."""
        excess = self.minus(limit)
        step_at_worst = (0, excess.step) if excess.step <= 0 else (excess.step, 0)
        slope, at_zero = excess.tokens + step_at_worst[0], excess.constant + step_at_worst[1]
        return None if slope <= 0 else -at_zero // slope


# No size is a product of more; a hostile program multiplies numbers without end.
MAX_FACTOR = 2**62
ZERO, ONE = Length(), Length(constant=1)
# The tokens of a row, of a step, and those before the step.
ROW, STEP, PAST = Length(tokens=1), Length(step=1), Length(tokens=1, step=-1)


def larger(a: Length | None, b: Length | None) -> Length | None:
    """Returns a number that is at least each of the two; None where one has no bound."""
    if a is None or b is None:
        return None
    if a.is_at_least(b):
        return a
    return b if b.is_at_least(a) else Length(*map(max, a, b))


def smaller(a: Length | None, b: Length | None) -> Length | None:
    """Returns a number that is at most each of the two; None where one has no bound."""
    if a is None or b is None:
        return None
    if a.is_at_least(b):
        return b
    return a if b.is_at_least(a) else Length(*map(min, a, b))


def total(*numbers: Length | None) -> Length | None:
    """Returns the sum; None where one is unknown."""
    result = ZERO
    for number in numbers:
        if number is None:
            return None
        result = result.plus(number)
    return result


def product(*numbers: Length | None) -> Length | None:
    """Returns the product of numbers of which at most one is no constant; else None."""
    factor, rest = 1, ONE
    for number in numbers:
        if number is None:
            return None
        if (constant := number.as_constant) is not None:
            factor *= constant
        elif rest == ONE:
            rest = number
        else:
            return None
    return None if abs(factor) > MAX_FACTOR else rest.times(factor)


class TokenRange(NamedTuple):
    """Rows of first to last tokens; last is None for rows of any length."""

    first: int = 1
    last: int | None = None

    def split_after(self, count: int) -> list[TokenRange]:
        """Returns the rows of up to `count` tokens and those of more, where the range has both."""
        if count < self.first or (self.last is not None and count >= self.last):
            return [self]
        return [TokenRange(self.first, count), TokenRange(count + 1, self.last)]

    def is_positive(self, number: Length) -> bool | None:
        """Whether a number is above 0 in every step of every row of the range (True) or in none (False); else None."""
        low, high = self._extremes(number)
        if low is not None and low > 0:
            return True
        return False if high is not None and high <= 0 else None

    def _extremes(self, number: Length) -> tuple[int | None, int | None]:
        """Returns the least and the greatest value of a number in the range, None where it has none."""
        slopes = number.tokens, number.tokens + number.step
        firsts = [
            number.tokens * self.first + number.step + number.constant,
            (number.tokens + number.step) * self.first + number.constant,
        ]
        if self.last is None:
            return (
                min(firsts) if min(slopes) >= 0 else None,
                max(firsts) if max(slopes) <= 0 else None,
            )
        lasts = [
            number.tokens * self.last + number.step + number.constant,
            (number.tokens + number.step) * self.last + number.constant,
        ]
        return min(firsts + lasts), max(firsts + lasts)
