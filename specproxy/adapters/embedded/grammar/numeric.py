"""Numbers within bounds, as automata over their JSON text."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from specproxy.adapters.embedded.grammar.automaton import Dfa, TooComplexError
from specproxy.adapters.embedded.grammar.regex import full_match

__all__ = ["Bounds", "number"]

INT_DIGITS = 18  # longest integer part that is generated, unless a bound is longer
FRACTION_DIGITS = 15  # longest fraction: what a double can hold
MAX_MODULUS = 2_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """What limits a number. `low` and `high` are inclusive unless marked as strict."""

    low: Decimal | None = None
    low_strict: bool = False
    high: Decimal | None = None
    high_strict: bool = False
    multiple_of: tuple[Decimal, ...] = ()

    @property
    def free(self) -> bool:
        """Whether nothing limits it."""
        return self.low is None and self.high is None and not self.multiple_of


def number(bounds: Bounds, *, integer: bool) -> Dfa:
    """The texts of all numbers within bounds, without exponents and superfluous zeros in front.

    Empty if there is none. Raises TooComplexError where a multiple is too large or too fine.
    """
    fraction = 0 if integer else FRACTION_DIGITS
    dfa = full_match(f"-?(?:0|[1-9]\\d{{0,{INT_DIGITS - 1}}}){_tail(fraction)}")
    if bounds.low is not None:
        dfa = full_match(_above(bounds.low, bounds.low_strict, fraction))
    if bounds.high is not None:
        below = full_match(_below(bounds.high, bounds.high_strict, fraction))
        dfa = dfa & below if bounds.low is not None else below
    for divisor in bounds.multiple_of:
        dfa = dfa & _multiples(divisor)
    return dfa


def _tail(digits: int) -> str:
    return f"(?:\\.\\d{{1,{digits}}})?" if digits else ""


def _above(low: Decimal, strict: bool, fraction: int) -> str:
    if low >= 0 and not (low == 0 and not strict):
        return _at_least(low, strict, fraction)
    everything = f"(?:0|[1-9]\\d{{0,{INT_DIGITS - 1}}}){_tail(fraction)}"
    return everything if low == 0 else f"{everything}|-(?:{_at_most(-low, strict, fraction)})"


def _below(high: Decimal, strict: bool, fraction: int) -> str:
    if high < 0 or (high == 0 and strict):
        return f"-(?:{_at_least(-high, strict, fraction)})"
    everything = f"-(?:0|[1-9]\\d{{0,{INT_DIGITS - 1}}}){_tail(fraction)}"
    return f"{everything}|{_at_most(high, strict, fraction)}"


def _split(value: Decimal) -> tuple[int, str]:
    """Integer part and fraction digits without zeros at the end."""
    whole, _, digits = format(value, "f").partition(".")
    return int(whole), digits.rstrip("0")


def _at_least(value: Decimal, strict: bool, fraction: int) -> str:
    """Numbers from `value` ≥ 0 up."""
    whole, digits = _split(value)
    if not fraction:
        first = whole + 1 if digits or strict else whole
        return _integers(first, None)
    tail = _fraction_above(digits, strict, fraction)
    return f"(?:{_integers(whole + 1, None)}){_tail(fraction)}|{whole}{tail}"


def _at_most(value: Decimal, strict: bool, fraction: int) -> str:
    """Numbers from 0 to `value` ≥ 0; matches nothing if there is none."""
    whole, digits = _split(value)
    if not fraction:
        last = whole - 1 if strict and not digits else whole
        return _integers(0, last)
    parts = [f"(?:{_integers(0, whole - 1)}){_tail(fraction)}"] if whole else []
    tail = _fraction_below(digits, strict)
    if tail is not None:
        parts.append(f"{whole}{tail}")
    return "|".join(parts) or NOTHING


NOTHING = "[]"  # an empty class: matches nothing


def _integers(low: int, high: int | None) -> str:
    """Integers 0 ≤ low…high; no `high` means up to the longest that is generated."""
    if high is None:
        high = 10 ** max(INT_DIGITS, len(str(low))) - 1
    if high < low:
        return NOTHING
    parts = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        parts.append(_same_length(str(first), str(min(high, 10**length - 1))))
    return "|".join(parts)


def _same_length(low: str, high: str) -> str:
    if not low:
        return ""
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    rest = len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return f"[{low[0]}-{high[0]}]\\d{{{rest}}}"
    parts = [low[0] + _same_length(low[1:], "9" * rest)]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}]\\d{{{rest}}}")
    parts.append(high[0] + _same_length("0" * rest, high[1:]))
    return "(?:" + "|".join(parts) + ")"


def _fraction_above(digits: str, strict: bool, limit: int) -> str:
    """What may follow an integer part for the fraction to be at least (above, if strict) ``0.digits``."""
    if not digits:
        some = f"\\.0{{0,{limit - 1}}}[1-9]\\d{{0,{limit - 1}}}"
        return some if strict else _tail(limit)
    parts = [
        f"{digits[:i]}[{int(digit) + 1}-9]\\d{{0,{limit}}}" for i, digit in enumerate(digits) if digit != "9"
    ]
    parts.append(f"{digits}0{{0,{limit}}}[1-9]\\d{{0,{limit}}}" if strict else f"{digits}\\d{{0,{limit}}}")
    return "\\.(?:" + "|".join(parts) + ")"


def _fraction_below(digits: str, strict: bool) -> str | None:
    """The same for at most (below, if strict); None if nothing may follow, not even the end."""
    if not digits:
        return None if strict else "(?:\\.0{1,15})?"
    parts = [
        f"{digits[:i]}[0-{int(digit) - 1}]\\d{{0,{FRACTION_DIGITS}}}"
        for i, digit in enumerate(digits)
        if digit != "0"
    ]
    # a beginning of the digits is less than all of them
    parts += [digits[:i] for i in range(1, len(digits))]
    if not strict:
        parts.append(f"{digits}0{{0,{FRACTION_DIGITS}}}")
    return "(?:\\.(?:" + "|".join(parts) + "))?"


def _multiples(divisor: Decimal) -> Dfa:
    """All numbers that a positive divisor divides, by tracking the remainder digit by digit."""
    exponent = divisor.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    places = max(0, -exponent)
    modulus = int(divisor.scaleb(places))
    if modulus * (places + 2) > MAX_MODULUS:
        raise TooComplexError(f"multiples of {divisor} need too many states")
    # states: start, after the sign, then (places of fraction read or -1 before the point, remainder)
    numbers = {
        (seen, rest): 2 + (seen + 1) * modulus + rest
        for seen in range(-1, places + 1)
        for rest in range(modulus)
    }
    signed = tuple((48 + d, 48 + d, numbers[-1, d % modulus]) for d in range(10))
    rows: list[tuple[tuple[int, int, int], ...]] = [((45, 45, 1), *signed), signed]
    accepting = [False, False]
    for seen, rest in numbers:
        row = []
        if seen < 0 and places:
            row.append((46, 46, numbers[0, rest]))
        if seen < places:
            after = -1 if seen < 0 else seen + 1
            row += [(48 + d, 48 + d, numbers[after, (rest * 10 + d) % modulus]) for d in range(10)]
        rows.append(tuple(row))
        # digits that were not written are zeros; a point without digits is no number
        missing = places - max(seen, 0)
        accepting.append(seen != 0 and rest * 10**missing % modulus == 0)
    return Dfa(tuple(rows), tuple(accepting)).reduced()
