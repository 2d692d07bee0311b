"""Lists cut into pages."""


def page_count(items, size):
    """How many pages `items` things fill."""
    return items // size


def page(items, number, size):
    """Page `number` of a list, counted from 1."""
    start = number * size
    return items[start : start + size]
