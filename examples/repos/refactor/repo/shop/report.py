"""Orders as text."""

from shop.orders import calc_total


def summary(name, lines):
    return f"{name}: {calc_total(lines) / 100:.2f}"
