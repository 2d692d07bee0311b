"""What an order costs."""


def calc_total(lines):
    """Sum of price times count over (price, count) pairs, in cents."""
    return sum(price * count for price, count in lines)
